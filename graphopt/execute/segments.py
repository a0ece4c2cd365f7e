"""The parts of a step in its one order: forward, backward, and the commit, which alone writes parameters and state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import backward_nodes
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind


@dataclass(frozen=True)
class Segment:
    """Calls ``start`` to ``end`` (exclusive) of the order, under a name."""

    name: str
    start: int
    end: int


def split_segments(program: Program) -> tuple[Segment, ...]:
    """Forward (up to the first call a tangent reaches), backward, update (from the first call that reads state)."""
    order = program.ops()
    update_start = _update_start(program, order)
    backward = backward_nodes(program)
    forward_end = next((i for i, node in enumerate(order[:update_start]) if node in backward), None)
    found = []
    if forward_end is None:
        forward_end = update_start
    if forward_end or not update_start:
        found.append(Segment("forward", 0, forward_end))
    if update_start > forward_end:
        found.append(Segment("backward", forward_end, update_start))
    if update_start < len(order):
        found.append(Segment("update", update_start, len(order)))
    return tuple(found)


def _update_start(program: Program, order: tuple[fx.Node, ...]) -> int:
    """The position of the first tensor operator that reads state or a step's number."""
    reached = {
        node
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind in (InputKind.STATE, InputKind.SCALAR)
    }
    for position, node in enumerate(order):
        if any(argument in reached for argument in node.all_input_nodes):
            if not ops.is_scalar_op(node):
                return position
            reached.add(node)
    return len(order)
