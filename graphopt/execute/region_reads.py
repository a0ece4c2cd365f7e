"""What crosses the borders of spans: who reads which value, and which updates a region can write by itself."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from graphopt.execute.region_cuts import Owners, Span
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program, nodes_in

OUTSIDE = -1
"""The reader of what leaves the program."""


def span_readers(
    program: Program, owners: Owners, spans: Sequence[Span], *, written: AbstractSet[fx.Node] = frozenset()
) -> dict[fx.Node, set[int]]:
    """For each value the numbers of the spans that read it, OUTSIDE for outputs but those ``written`` inside a region.

    The sets are for membership tests.
    """
    readers: dict[fx.Node, set[int]] = {}
    for number, span in enumerate(spans):
        for node in span.nodes:
            for base in owners.bases_read(node):
                readers.setdefault(base, set()).add(number)
    for value in nodes_in(program.output_values()):
        if value not in written:
            readers.setdefault(owners.base(value), set()).add(OUTSIDE)
    return readers


def writes_inside(program: Program, spans: Sequence[Span]) -> dict[int, dict[fx.Node, fx.Node]]:
    """For each region the values it computes, nobody else reads, and may write before it ends, with their targets."""
    plan = plan_memory(program)
    position = {node: i for i, node in enumerate(plan.order)}
    span_of = {node: number for number, span in enumerate(spans) for node in span.nodes if span.is_region}
    returned = list(program.output_values())
    found: dict[int, dict[fx.Node, fx.Node]] = {}
    for i, writes in enumerate(plan.write_after):
        for write in writes:
            number = span_of.get(write.value)
            if number is None or returned.count(write.value) != 1:
                continue
            is_before_end = i <= position[spans[number].nodes[-1]]
            if is_before_end and all(user.op == "output" or span_of.get(user) == number for user in write.value.users):
                found.setdefault(number, {})[write.value] = write.target
    return found
