"""Offload: values leave for far memory once they are made, and come back before the backward needs them.

Before::

    h: 'f32[512,1024]' = aten.mm.default(x, w)
    y = aten.sin.default(h)                              # ... the rest of the forward, then the backward ...
    grad = aten.mul.Tensor(tangent, h)

After::

    h: 'f32[512,1024]' = aten.mm.default(x, w)
    offload = graphopt.offload.default(h)                # the copy out starts
    y = aten.sin.default(h)
    offloaded = graphopt.offloaded.default(offload, h)   # and is over; h dies
    ...
    prefetch = graphopt.prefetch.default(offloaded, [512, 1024], [1024, 1], ...)   # the copy in starts
    ...
    arrived = graphopt.arrived.default(prefetch, offloaded)                        # and is over
    grad = aten.mul.Tensor(tangent, arrived)

It executes the rows of ``program.decisions`` that say ``offload``, each about the base of a storage; views that the
backward reads are made again from what came back. ``prefetch`` bounds how many values are in flight: one that leaves is
waited for where the value ``prefetch`` places behind it leaves, or at its last use in the forward if that is later; one
that returns sets out where the value ``prefetch`` places before it is needed. With 0, copies and computing take turns.

Saves the bytes of each value between the end of its copy out and the start of its copy in. Costs two copies over the
link, hidden as far as computing takes longer; 8 bytes for the ticket; while it is in flight, a value is in near memory.
Refuses, with a reason in the table of decisions, what ``offloadable`` objects to: views, what the caller owns, outputs,
what is written in place, what the backward needs at once, and what would be gone only while nothing is allocated. The
copies are of bytes, so the pass is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.decisions import Action
from graphopt.ir.offloadable import OffloadFacts, view_chain
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import TensorSpec
from graphopt.ir.transfer_ops import ARRIVED, OFFLOAD, OFFLOADED, PREFETCH
from graphopt.pipeline.pass_base import Changes, Pass, Refusal


@dataclass(frozen=True)
class Offload(Pass):
    """Send decided values to far memory between forward and backward."""

    name: ClassVar[str] = "offload"
    stage: ClassVar[Stage] = Stage.STEP
    after: ClassVar[tuple[str, ...]] = ("dedupe",)

    prefetch: int = 2

    def apply(self, program: Program) -> Changes:
        """Plan all journeys on the program as it is, then insert their calls."""
        decided = [row.value for row in program.decisions.with_action(Action.OFFLOAD)]
        if not decided:
            return Changes(0)
        facts = OffloadFacts(program)
        bases, refusals = _accepted(facts, decided)
        journeys, too_short = _planned(facts, bases, self.prefetch)
        _insert_departures(program, facts, journeys)
        for journey in sorted(journeys, key=lambda journey: journey.needed_at):
            _insert_return(program, facts, journey)
        _note(program, (*refusals, *too_short))
        return Changes(len(journeys), (*refusals, *too_short))


@dataclass
class _Journey:
    """One value: positions (of the program before the pass) of the call before which each step stands.

    ``leaves_with``: the value whose departure ends this one's copy out, or None where its own last use does; ``sent``:
    the ticket behind that end, once it is there.
    """

    base: fx.Node
    gone_at: int
    needed_at: int
    fetched_at: int
    leaves_with: fx.Node | None
    sent: fx.Node | None = None


def _accepted(facts: OffloadFacts, decided: list[str]) -> tuple[list[fx.Node], list[Refusal]]:
    """Bases to send, in order of definition, without those that have been sent; and why others are not."""
    by_name = {node.name: node for node in facts.program.graph.nodes}
    bases, refusals = [], []
    for name in decided:
        node = by_name.get(name)
        if node is not None and any(ops.is_call(user, OFFLOAD) for user in node.users):
            continue
        objection = "no value has this name any more" if node is None else facts.objection(node)
        if objection is None:
            assert node is not None, "only a node is without objection"
            bases.append(node)
        else:
            refusals.append(Refusal(name, objection))
    return sorted(dict.fromkeys(bases), key=facts.position.__getitem__), refusals


def _planned(facts: OffloadFacts, bases: list[fx.Node], depth: int) -> tuple[list[_Journey], list[Refusal]]:
    """The journeys of ``bases``; those that would be gone too shortly are declined, and the others planned again."""
    refusals: list[Refusal] = []
    while True:
        journeys = _timed(facts, bases, depth)
        short = [journey for journey in journeys if not facts.makes_memory(journey.gone_at, journey.fetched_at)]
        if not short:
            return journeys, refusals
        bases = [base for base in bases if all(journey.base is not base for journey in short)]
        reason = "it is used again at once: it would be gone only while nothing is allocated"
        refusals += [Refusal.at(journey.base, reason) for journey in short]


def _timed(facts: OffloadFacts, bases: list[fx.Node], depth: int) -> list[_Journey]:
    """Journeys in order of definition: at most ``depth`` values in flight in each direction, but for late last uses."""
    needed_at = {base: facts.position[facts.late_users(base)[0]] for base in bases}
    returning = sorted(bases, key=needed_at.__getitem__)
    # Behind the first call of the backward: before it, a buffer would live through all that may lie between.
    fetched_at = {
        base: needed_at[returning[i - depth]] if i >= depth else facts.split + 1 for i, base in enumerate(returning)
    }
    journeys = []
    for i, base in enumerate(bases):
        gone_at, leaves_with = facts.last_forward_use(base) + 1, None
        later = bases[i + depth] if depth and i + depth < len(bases) else None
        if later is not None and facts.position[later] + 1 >= gone_at:
            gone_at, leaves_with = facts.position[later] + 1, later
        journeys.append(_Journey(base, gone_at, needed_at[base], fetched_at[base], leaves_with))
    return journeys


def _insert_departures(program: Program, facts: OffloadFacts, journeys: list[_Journey]) -> None:
    """The starts of all copies out, then the waits for them: before the departure that a wait makes room for, or behind
    the last use in the forward."""
    first_at: dict[fx.Node, fx.Node] = {}
    starts: dict[fx.Node, fx.Node] = {}
    for journey in journeys:
        anchor = facts.behind(facts.position[journey.base])
        starts[journey.base] = program.insert_before(anchor, OFFLOAD, journey.base, origin_of=journey.base)
        first_at.setdefault(anchor, starts[journey.base])
    for journey in journeys:
        anchor = facts.behind(journey.gone_at - 1)
        if journey.leaves_with is not None:
            anchor = starts[journey.leaves_with]
        elif anchor is not facts.behind(facts.position[journey.base]):
            anchor = first_at.get(anchor, anchor)  # what the last use makes leaves behind this wait, not beside it
        start = starts[journey.base]
        journey.sent = program.insert_before(anchor, OFFLOADED, start, journey.base, origin_of=journey.base)


def _insert_return(program: Program, facts: OffloadFacts, journey: _Journey) -> None:
    """The copy in, the wait for it, and the views that the backward reads, each right before its first use."""
    base = journey.base
    assert journey.sent is not None, "what returns has left"
    spec = TensorSpec.of(program.value(base))
    late = facts.late_users(base)
    members = facts.members(base)
    buffer = program.insert_before(
        facts.order[journey.fetched_at],
        PREFETCH,
        journey.sent,
        list(spec.shape),
        list(spec.stride),
        dtype=spec.dtype,
        device=spec.device,
        origin_of=base,
    )
    returned = {base: program.insert_before(late[0], ARRIVED, buffer, journey.sent, origin_of=base)}
    for user in late:
        for member in members:
            if member in user.all_input_nodes:
                user.replace_input_with(member, _made_again(program, base, member, returned, anchor=user))
    for view in facts.late_members(base):
        view.meta["val"] = program.infer(view)  # it shows the memory that came back
    for view in reversed(members):
        program.erase_if_unused(view)


def _made_again(
    program: Program, base: fx.Node, member: fx.Node, returned: dict[fx.Node, fx.Node], *, anchor: fx.Node
) -> fx.Node:
    """What stands for ``member`` in the memory that came back; ``returned`` holds what there is already."""
    for view in view_chain(base, member) or ():
        if view not in returned:
            source, *rest = view.args
            assert isinstance(source, fx.Node) and callable(view.target), f"{view.name} is a view of a value"
            again = (returned[source], *rest)
            returned[view] = program.insert_before(anchor, view.target, *again, origin_of=view, **view.kwargs)
    return returned[member]


def _note(program: Program, refusals: tuple[Refusal, ...]) -> None:
    """Write into the table of decisions what was declined: these values stay."""
    rows = []
    for refusal in refusals:
        row = program.decisions.of(refusal.node)
        assert row is not None, "only decided values are declined"
        rows.append(replace(row, action=Action.SAVE, seconds=0.0, reason=f"not offloaded: {refusal.reason}"))
    if rows:
        program.decisions = program.decisions.joined(*rows)
