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

FP8 codes of a weight are such a copy too, in any grid and layout: the weight is quantized again, and where one scale is
for all of it, with the scale that is there. What products pad is padded again. The bits are the same.

Saves the bytes of every copy between two uses, together up to 2 bytes a parameter (1 in FP8) at the end of the forward
part. Costs one pass over the weight for each, 6 bytes a parameter of traffic. A copy is made again only if it would
wait, by the cost model, ten times as long as that takes: the head's, say, whose backward follows its forward, is kept.

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
from graphopt.ir.fp8_codes import Codes, codes_of, is_quantize, make_again, make_one_layout
from graphopt.ir.fp8_padding import is_padding
from graphopt.ir.kept_values import LateUse
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program, Stage, nodes_in
from graphopt.ir.spec import InputKind
from graphopt.ir.twins import insert_twin, is_twin
from graphopt.ir.view_copies import read_instead
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
class _Use(LateUse):
    """A reader of the copy or of a view of it, perhaps padded, early ones too. ``position``: where among all calls;
    ``seconds``: what making ``value`` again takes, views left out.
    """

    position: int
    seconds: float


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
        copies = _weight_copies(program)
        if not copies:
            return Changes(0)
        held = Room(self.budget, self.reserved_bytes, self.margin_bytes).objection(program)
        if held is not None:
            return Changes(0, (Refusal.at(copies[0].call, held),))
        seconds = call_seconds(program, machine_rates())
        clock = list(accumulate((seconds[node] for node in calls), initial=0.0))
        position = {node: i for i, node in enumerate(calls)}
        split = forward_end(program)
        rows = []
        count = 0
        requantized = []
        for copy in copies:
            late_uses = _late_uses(_uses(copy, position, seconds), clock, split)
            for uses in late_uses:
                anchor = uses[0].user
                read_instead(program, uses, anchor, copy.again(program, anchor))
            if late_uses and copy.codes is not None:
                requantized.append(copy.call)
            count += len(late_uses)
            if program.decisions.of(copy.value.name) is None:
                again_seconds = sum(group[0].seconds for group in late_uses)
                rows.append(_decision(program, copy, again_seconds, len(late_uses)))
        for call in dict.fromkeys(requantized):
            make_one_layout(program, call)
        program.decisions = program.decisions.joined(*rows)
        if count:
            program.refresh()
        return Changes(count)


@dataclass(frozen=True)
class _Copy:
    """A copy of a weight: ``call`` makes it, ``value`` is it. ``codes``: what it is where it is FP8."""

    call: fx.Node
    value: fx.Node
    codes: Codes | None = None

    @property
    def parts(self) -> tuple[fx.Node, ...]:
        """The tensors that are made again: the copy itself, or codes and, unless it is kept, their scale."""
        if self.codes is None or self.codes.lasting_scale is self.codes.scale:
            return (self.value,)
        return (self.codes.codes, self.codes.scale)

    def again(self, program: Program, anchor: fx.Node) -> dict[fx.Node, fx.Node]:
        """The parts, each with a new one that is made before ``anchor``."""
        if self.codes is not None:
            codes, scale = make_again(program, self.codes, anchor)
            return {self.codes.codes: codes, self.codes.scale: scale}
        target: Any = self.call.target
        return {self.call: insert_twin(program, anchor, self.call, target, *self.call.args, **self.call.kwargs)}


def _weight_copies(program: Program) -> list[_Copy]:
    """The copies of parameters that the forward part makes, large enough and not made again yet."""
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    parameters = {node for node, entry in inputs if entry.kind is InputKind.PARAM}
    returned = set(nodes_in(program.output_values()))
    found = []
    for call in program.ops()[: forward_end(program)]:
        if is_twin(call) or not _reads_one_of(parameters, call):
            continue
        if is_quantize(call):
            found += [_Copy(call, codes.codes, codes) for codes in codes_of(call)]
        elif ops.is_conversion(call):
            found.append(_Copy(call, call))
    return [
        copy for copy in found if copy.value not in returned and program.spec(copy.value).nbytes >= _WORTH_RECASTING
    ]


def _reads_one_of(parameters: set[fx.Node], call: fx.Node) -> bool:
    """Whether the first argument of ``call`` is one of ``parameters`` or a view of one."""
    source = call.args[0] if call.args else None
    while isinstance(source, fx.Node) and ops.is_view(source):
        source = source.args[0]
    return source in parameters


def _uses(copy: _Copy, position: dict[fx.Node, int], seconds: dict[fx.Node, float]) -> list[_Use]:
    """The calls that read ``copy``, as it is, viewed or padded, in order; making codes is the first one."""

    def reads(value: fx.Node, again_seconds: float) -> Iterator[_Use]:
        for user in value.users:
            if ops.is_view(user):
                yield from reads(user, again_seconds)
            elif is_padding(user):
                yield from reads(user, again_seconds + seconds[user])
            elif user in position:
                yield _Use(user, value, position[user], again_seconds)

    made = () if copy.codes is None else (_Use(copy.call, copy.call, position[copy.call], 0.0),)
    # The scale is read where the codes are.
    found = [use for part in copy.parts for use in reads(part, seconds[copy.call]) if use.user is not copy.call]
    return sorted((*made, *found), key=lambda use: use.position)


def _late_uses(uses: list[_Use], clock: list[float], split: int) -> list[list[_Use]]:
    """The uses of the backward part that a new copy serves, one list a copy."""
    groups: list[list[_Use]] = []
    for before, use in pairwise(uses):
        waits = clock[use.position] - clock[before.position + 1]
        if use.position >= split and waits > _PATIENCE * use.seconds:
            groups.append([use])
        elif groups:
            groups[-1].append(use)
    return groups


def _decision(program: Program, copy: _Copy, seconds: float, copies: int) -> Decision:
    again = "cast" if copy.codes is None else "quantized"
    reason = (
        f"{again} again where it is needed, which takes a tenth of the time it would wait or less"
        if copies
        else f"it is needed again so soon that to be {again} again would take longer than a tenth of that"
    )
    return Decision(
        value=copy.value.name,
        action=Action.RECAST if copies else Action.SAVE,
        nbytes=program.spec(copy.value).nbytes,
        seconds=seconds,
        reason=reason,
        source=str(program.origin(copy.value)),
        copies=copies,
    )
