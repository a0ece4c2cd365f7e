"""A low-precision copy of a weight is made again where it is needed again, where keeping it would hold memory for long.

Before (mixed precision: the weight is in float32, matrix products are in bfloat16)::

    low: 'bf16[D,D]' = aten._to_copy.default(weight, dtype=torch.bfloat16)
    mm: 'bf16[N,D]' = aten.mm.default(x, low)              # forward
    ...
    mm_1: 'bf16[N,D]' = aten.mm.default(grad, low)         # backward

After::

    low: 'bf16[D,D]' = aten._to_copy.default(weight, dtype=torch.bfloat16)
    mm: 'bf16[N,D]' = aten.mm.default(x, low)              # low dies here
    ...
    low_again: 'bf16[D,D]' = aten._to_copy.default(weight, dtype=torch.bfloat16)
    mm_1: 'bf16[N,D]' = aten.mm.default(grad, low_again)

Saves the bytes of every copy between two uses, together up to 2 bytes a parameter at the end of the forward part. Costs
one pass over the weight for each, 6 bytes a parameter of traffic. A copy is made again only if it would wait, by the
cost model, ten times as long as that takes: the head's, say, whose backward follows its forward, is kept.

``program.decisions`` says of each copy which it is. Runs before updates are moved, so that each waits for the last copy
of its parameter. Refuses copies below 64 KiB and those that are outputs; and, under a budget, to act when the budget
holds without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.decisions import Action, Decision
from graphopt.ir.erase import erase_dead
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program, Stage, nodes_in
from graphopt.ir.spec import InputKind
from graphopt.ir.twins import SUFFIX, is_twin
from graphopt.pipeline.pass_base import Changes, Pass, Refusal
from graphopt.planner.costs import call_seconds
from graphopt.planner.machine_rates import machine_rates
from graphopt.planner.room import Room

_WORTH_RECASTING = 64 * 2**10
"""Bytes of a copy. Below, a call costs more than the memory is worth."""

_PATIENCE = 10.0
"""How many times as long as it takes to make may a copy wait; beyond, making it again costs less than a tenth of the
time in which its memory would be held."""


@dataclass(frozen=True)
class _Use:
    """``user`` reads ``value``: the copy itself, or a view of it. ``position``: where among all calls."""

    user: fx.Node
    value: fx.Node
    position: int


@dataclass(frozen=True)
class RecastWeights(Pass):
    """See the module's docstring. ``budget`` and the bytes beside it: see ``Room``."""

    budget: int | str | Fraction | None = None
    reserved_bytes: int = 0
    margin_bytes: int = 0

    name: ClassVar[str] = "recast-weights"
    stage: ClassVar[Stage] = Stage.STEP
    after: ClassVar[tuple[str, ...]] = ("dedupe",)

    def apply(self, program: Program) -> Changes:
        calls = program.ops()
        casts = _weight_casts(program)
        if not casts:
            return Changes(0)
        held = Room(self.budget, self.reserved_bytes, self.margin_bytes).objection(program)
        if held is not None:
            return Changes(0, (Refusal.at(casts[0], held),))
        seconds = call_seconds(program, machine_rates())
        clock = list(accumulate((seconds[node] for node in calls), initial=0.0))
        position = {node: i for i, node in enumerate(calls)}
        rows = []
        count = 0
        for cast in casts:
            late_uses = _late_uses(_uses(cast, position), clock, seconds[cast], forward_end(program))
            for uses in late_uses:
                _insert_copy(program, cast, uses)
            count += len(late_uses)
            if program.decisions.of(cast.name) is None:
                rows.append(_decision(program, cast, seconds[cast], len(late_uses)))
        program.decisions = program.decisions.joined(*rows)
        if count:
            program.refresh()
        return Changes(count)


def _weight_casts(program: Program) -> list[fx.Node]:
    """The calls of the forward part that are a parameter in another dtype, large enough and not made again yet."""
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    parameters = {node for node, entry in inputs if entry.kind is InputKind.PARAM}
    returned = set(nodes_in(program.output_values()))
    early = program.ops()[: forward_end(program)]
    return [node for node in early if _is_weight_cast(program, node, parameters) and node not in returned]


def _is_weight_cast(program: Program, node: fx.Node, parameters: set[fx.Node]) -> bool:
    if not ops.is_conversion(node) or is_twin(node) or program.spec(node).nbytes < _WORTH_RECASTING:
        return False
    source = node.args[0]
    while isinstance(source, fx.Node) and ops.is_view(source):
        source = source.args[0]
    return source in parameters


def _uses(cast: fx.Node, position: dict[fx.Node, int]) -> list[_Use]:
    """The calls that read ``cast`` or a view of it, in order; views are no uses."""

    def reads(value: fx.Node) -> Iterator[_Use]:
        for user in value.users:
            if ops.is_view(user):
                yield from reads(user)
            elif user in position:
                yield _Use(user, value, position[user])

    return sorted(reads(cast), key=lambda use: use.position)


def _late_uses(uses: list[_Use], clock: list[float], cast_seconds: float, split: int) -> list[list[_Use]]:
    """The uses of the backward part that a new copy serves, one list a copy."""
    groups: list[list[_Use]] = []
    for before, use in pairwise(uses):
        waits = clock[use.position] - clock[before.position + 1]
        if use.position >= split and waits > _PATIENCE * cast_seconds:
            groups.append([use])
        elif groups:
            groups[-1].append(use)
    return groups


def _insert_copy(program: Program, cast: fx.Node, uses: list[_Use]) -> None:
    """Let ``uses`` read a new copy, made right before the first of them, and views of it."""
    anchor = uses[0].user
    copies: dict[fx.Node, fx.Node] = {}
    for use in uses:
        copy = _copied(program, cast, use.value, anchor, copies)
        use.user.replace_input_with(use.value, copy)
        erase_dead(program, (use.value,))


def _copied(
    program: Program, cast: fx.Node, value: fx.Node, anchor: fx.Node, copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    """``value``, which is ``cast`` or a view of it, again before ``anchor``, with all that leads to it."""
    if value in copies:
        return copies[value]
    source: Any = value.args[0]
    if value is not cast:
        source = _copied(program, cast, source, anchor, copies)
    target: Any = value.target
    copy = program.insert_before(anchor, target, source, *value.args[1:], origin_of=value, **value.kwargs)
    origin = program.origins.pop(copy.name)
    copy._rename(f"{value.name}_{SUFFIX}")
    program.origins[copy.name] = origin
    copies[value] = copy
    return copy


def _decision(program: Program, cast: fx.Node, seconds: float, copies: int) -> Decision:
    reason = (
        "cast again where it is needed, which takes a tenth of the time it would wait or less"
        if copies
        else "it is needed again so soon that casting again would take longer than a tenth of that"
    )
    return Decision(
        value=cast.name,
        action=Action.RECAST if copies else Action.SAVE,
        nbytes=program.spec(cast).nbytes,
        seconds=seconds * copies,
        reason=reason,
        source=str(program.origin(cast)),
        copies=copies,
    )
