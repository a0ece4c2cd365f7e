"""A compiled region: what a lowered Program calls in the place of many operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphopt.capture.trace import fake_like
from graphopt.execute.region_graph import RegionGraph
from graphopt.ir.fake import is_fake


class Region:
    """A compiled region. ``region(*inputs)`` returns its outputs as a tuple and writes what it updates.

    ``written_arguments``: positions of the inputs that it writes into.
    """

    def __init__(self, graph: RegionGraph, number: int, run: Callable[[list[Any]], Sequence[Any]], seconds: float):
        self.__name__ = f"region_{number}"
        self.text = graph.text
        self.output_specs = graph.output_specs
        self.written_arguments = tuple(position for _, position in graph.writes)
        self.num_calls = len(graph.body)
        self.seconds = seconds
        self._run = run

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs; on fake values, fake ones."""
        fake = next((value for value in inputs if is_fake(value)), None)
        if fake is not None:
            return tuple(fake_like(fake.fake_mode, spec) for spec in self.output_specs)
        return tuple(self._run(list(inputs)))

    def boxed(self, inputs: list[Any]) -> Sequence[Any]:
        """As calling it, but ``inputs`` is emptied, so that what nobody else holds is freed at its last use inside."""
        return self._run(inputs)

    def __repr__(self) -> str:
        return self.__name__
