"""The parts of a step in its one order: forward, backward, and the commit, which alone writes parameters and state."""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.ir import ops
from graphopt.ir.liveness import MemoryPlan, forward_end, plan_memory
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind
from graphopt.ir.storage import storage_map


@dataclass(frozen=True)
class Segment:
    """Calls ``start`` to ``end`` (exclusive) of the order, under a name."""

    name: str
    start: int
    end: int


def split_segments(program: Program, plan: MemoryPlan | None = None) -> tuple[Segment, ...]:
    """Forward (up to the first call a tangent reaches), backward, and update (from the first write on).

    Programs without a tangent or without writes have fewer parts, but always at least one.
    """
    plan = plan or plan_memory(program)
    order = plan.order
    update_start = _first_write(program, plan)
    split = min(forward_end(program), update_start)
    found = []
    if split or not update_start:
        found.append(Segment("forward", 0, split))
    if update_start > split:
        found.append(Segment("backward", split, update_start))
    if update_start < len(order):
        found.append(Segment("update", update_start, len(order)))
    return tuple(found)


def _first_write(program: Program, plan: MemoryPlan) -> int:
    """The position of the first call that writes a parameter or state, or after which one is written."""
    storages = storage_map(program)
    owned = {
        number
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind in (InputKind.PARAM, InputKind.STATE)
        for number in storages.held[node]
    }
    for position, node in enumerate(plan.order):
        written = [number for target in ops.mutated_arguments(node) for number in storages.held[target]]
        if plan.write_after[position] or not owned.isdisjoint(written):
            return position
    return len(plan.order)
