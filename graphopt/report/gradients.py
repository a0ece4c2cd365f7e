"""Which values of a program are gradients of parameters, found from where they are used."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from graphopt.capture.accumulation import WINDOW
from graphopt.execute.segments import split_segments
from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, OutputKind


def parameter_gradients(program: Program) -> dict[str, tuple[fx.Node, ...]]:
    """For each parameter with a gradient in ``program``: its values, the one used last first.

    They are its GRAD output, or what its update (or the window that accumulates) reads: the gradient as clipped or
    converted, then as the backward part made it.
    """
    finder = _Finder(program)
    found = {}
    for value, output in zip(program.output_values(), program.signature.outputs, strict=True):
        name = output.name
        if output.kind is OutputKind.STATE_UPDATE and name.startswith(f"{WINDOW}."):
            name = name.removeprefix(f"{WINDOW}.")
        elif output.kind not in (OutputKind.GRAD, OutputKind.PARAM_UPDATE):
            continue
        gradients = (value,) if output.kind is OutputKind.GRAD else finder.gradients(value, name)
        if gradients:
            found[name] = gradients
    return found


class _Finder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.forward_end = next((part.end for part in split_segments(program) if part.name == "forward"), 0)
        self.position = {node: i for i, node in enumerate(program.ops())}
        inputs = list(zip(program.placeholders(), program.signature.inputs, strict=True))
        self.parameters = {node for node, entry in inputs if entry.kind is InputKind.PARAM}
        self.windows = {node for node, entry in inputs if entry.name.startswith(WINDOW)}
        state = [node for node, entry in inputs if entry.kind is InputKind.STATE and node not in self.windows]
        numbers = [node for node, entry in inputs if entry.kind is InputKind.SCALAR]
        self.from_state = self._reached(state)
        self.in_update = self._reached([*state, *numbers])

    def gradients(self, updated: fx.Node, parameter: str) -> tuple[fx.Node, ...]:
        """The nearest gradients of ``parameter`` behind its new value (or its new window) ``updated``."""
        index = self.program.signature.input_index(parameter, InputKind.PARAM)
        if index is None:
            return ()
        shape = self.program.spec(self.program.placeholders()[index]).shape
        pending, found = [updated, *self._read_where_written(updated)], []
        seen = set(pending)
        while pending:
            node = pending.pop()
            if self._is_gradient(node, shape):
                found.append(node)
                if not self._passes_on(node):
                    continue
            elif node not in self.in_update:
                continue
            fresh = [argument for argument in node.all_input_nodes if argument not in seen]
            seen.update(fresh)
            pending += [argument for argument in fresh if node not in found or self._is_gradient(argument, shape)]
        return tuple(sorted(found, key=self.position.__getitem__, reverse=True))

    def _read_where_written(self, parameter: fx.Node) -> list[fx.Node]:
        """What a call reads that writes ``parameter``, and no other, where it lies."""
        found = []
        for node in parameter.users if parameter in self.parameters else ():
            written = list(ops.mutated_arguments(node))
            if [target for target in written if target in self.parameters] == [parameter]:
                found += [argument for argument in node.all_input_nodes if argument not in written]
        return found

    def _is_gradient(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        if self.position.get(node, -1) < self.forward_end or node in self.from_state:
            return False
        if node in self.in_update and any(argument in self.parameters for argument in node.all_input_nodes):
            return False
        value = node.meta["val"]
        return isinstance(value, torch.Tensor) and tuple(value.shape) == shape

    def _passes_on(self, node: fx.Node) -> bool:
        """Whether ``node`` only clips, converts or accumulates a gradient made before it."""
        accumulates = any(argument in self.windows for argument in node.all_input_nodes)
        return node in self.in_update or accumulates or ops.copied_argument(node) is not None

    def _reached(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        """Nodes after the forward part that depend on ``sources`` (for membership tests; never iterate)."""
        reached = set(sources)
        for node, position in self.position.items():
            if position >= self.forward_end and any(argument in reached for argument in node.all_input_nodes):
                reached.add(node)
        return reached
