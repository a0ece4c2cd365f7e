"""Comparing two Programs call by call: what a rewrite does to numbers, apart from what the program makes of that.

A rounding that a pass adds to a deep model goes through everything behind it, and where that is steep (attention that
is sharp, as with random weights) an output differs as much as if it were wrong. So each call of the new program is
given the numbers of the old one, wherever both have the value: then its own error is all that is seen, in a model of
one layer or of a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.ir.numeric import NORM_SHARE, Difference, FillingInterpreter, difference_of, run_isolated
from graphopt.ir.program import Program


def differences_of_calls(
    before: Program, after: Program, inputs: Sequence[Any], *, tolerance: float
) -> tuple[Difference, ...]:
    """Values and outputs of ``after`` that differ by more than ``tolerance`` where everything that they are made of is
    as in ``before``. Values belong together by their names. Both programs are functional.
    """
    recording = _RecordingInterpreter(before.module)
    expected = run_isolated(recording, inputs)
    judging = _JudgingInterpreter(after, recording.values, tolerance)
    actual = run_isolated(judging, inputs)
    outputs = zip(expected, actual, before.signature.outputs, strict=True)
    compared = (difference_of(left, right, output.name, output.kind) for left, right, output in outputs)
    return (*judging.found, *(found for found in compared if found is not None and not found.within(tolerance)))


class _RecordingInterpreter(FillingInterpreter):
    """Runs a graph and keeps every tensor by name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor):
            self.values[n.name] = result
        return result


class _JudgingInterpreter(FillingInterpreter):
    """Runs a graph on the ``expected`` values, and finds those that it computes otherwise from them."""

    def __init__(self, program: Program, expected: Mapping[str, torch.Tensor], tolerance: float) -> None:
        super().__init__(program.module)
        self._expected = expected
        self._tolerance = tolerance
        self._returned = {value.name for value in program.output_values() if isinstance(value, fx.Node)}
        self.found: list[Difference] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        expected = self._expected.get(n.name)
        # What the program returns is compared as an output; of a call with several results, each where it is taken out.
        if expected is None or n.name in self._returned or not isinstance(result, torch.Tensor):
            return result
        if expected.shape != result.shape:
            return result
        expected = expected.to(result.dtype)
        found = difference_of(expected, result, n.name, "value")
        if found is not None and not found.within(self._tolerance) and not self._may_jump(expected, result):
            self.found.append(found)
        given = torch.empty_like(result)
        # A view with gaps keeps its own layout, which later views may rely on.
        return given.copy_(expected) if given.stride() == result.stride() else result

    def _may_jump(self, expected: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether so few elements differ that a rounding may have made them others, as it may what a comparison says,
        or an integer: of as many as all errors of a number may be together.
        """
        if result.is_floating_point() or result.is_complex():
            return False
        return float((expected != result).double().mean()) <= NORM_SHARE * self._tolerance
