"""Release gradients: each parameter is updated as soon as its gradient is complete, and the gradient dies there.

Before::

    mm = aten.mm.default(t, x)              # gradient of the last layer
    mm_1 = aten.mm.default(g, p_head)       # on to the layers before it
    ...                                     # their backward
    add = aten.add.Tensor(p_head, mm, alpha=neg)

After::

    mm = aten.mm.default(t, x)
    mm_1 = aten.mm.default(g, p_head)       # the last reader of the old parameter
    add = aten.add.Tensor(p_head, mm, alpha=neg)
    ...

Saves: of all gradients, which were alive together at the end of the backward, only the few that are being completed
remain: up to the bytes of all parameters. Costs nothing; but parameters are written from early in the backward on, so
a failure during the rest of the step leaves the step broken until a state is loaded.

An update moves no further than behind the last reader of the parameter and the state it overwrites: before it, the new
values could not be written in place and would be a second copy.

Refuses: updates that need a value computed from several gradients, such as the factor of clipping by the global norm,
or the number by which a step in FP8 that is not finite is skipped; gradients that are outputs; updates that draw random
numbers or write in place already. Of gradients that must wait, each one's own norm or extremes are computed right
behind it; where extremes of what it is widened from are all that is asked, the widening waits for the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.decisions import Action, Decision
from graphopt.ir.fp8_watch import FP8_EVIDENCE
from graphopt.ir.liveness import backward_nodes
from graphopt.ir.ordering import body, reorder
from graphopt.ir.program import Program, Stage, nodes_in
from graphopt.ir.spec import UPDATE_KINDS
from graphopt.ir.storage import StorageMap, storage_map
from graphopt.ir.units import format_bytes
from graphopt.ir.updates import UpdateGroup, update_groups
from graphopt.pipeline.pass_base import Changes, Pass, Refusal
from graphopt.planner.costs import node_flops


@dataclass(frozen=True)
class ReleaseGradients(Pass):
    """Updates move into the backward, to where their gradients are complete."""

    name: ClassVar[str] = "release-gradients"
    stage: ClassVar[Stage] = Stage.STEP

    def apply(self, program: Program) -> Changes:
        groups = update_groups(program)
        if not groups:
            return Changes(0)
        storages = storage_map(program)
        leaving = _leaving(program, storages)
        joint = next((node for group in groups for node in group.joint_values), None)
        waits = None if joint is None else _why_it_waits(program, joint)
        objections = {group.parameter: _objection(group, waits, leaving, storages) for group in groups}
        released = [group for group in groups if objections[group.parameter] is None]
        kept = [group for group in groups if objections[group.parameter] is not None]
        before = body(program)
        after = _norms_behind_gradients(program, _Interleaving(before, released, storages).order, kept)
        rows = [row for group in groups for row in _decisions(program, storages, group, objections[group.parameter])]
        program.decisions = program.decisions.joined(*rows, notes=_price_of_keeping(program, joint, rows))
        refusals = tuple(Refusal(row.value, row.reason) for row in rows if row.action is Action.KEEP)
        if after == before:
            return Changes(0, refusals)
        reorder(program, after)
        return Changes(_num_moved(before, after, released), refusals)


def _price_of_keeping(program: Program, joint: fx.Node | None, rows: list[Decision]) -> tuple[str, ...]:
    """What waiting for a value of all gradients costs, beside the other exact way: two backwards."""
    kept = sum(row.nbytes for row in rows if row.action is Action.KEEP)
    if joint is None or not kept:
        return ()
    backward = backward_nodes(program)
    flops = sum(node_flops(node) for node in program.ops() if node in backward)
    note = (
        f"{format_bytes(kept)} of gradients wait for {joint.name}, which needs them all; a second backward, about "
        f"{flops / 1e9:.3g} GFLOP more, would let each die: keeping them is what is done"
    )
    return () if note in program.decisions.notes else (note,)


def _gradients(group: UpdateGroup) -> tuple[fx.Node, ...]:
    return group.gradients or group.joint_values


def _leaving(program: Program, storages: StorageMap) -> set[int]:
    """Storages that the caller gets."""
    returned = [
        value
        for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
        if output.kind not in UPDATE_KINDS
    ]
    return {number for node in nodes_in(returned) for number in storages.held[node]}


def _why_it_waits(program: Program, joint: fx.Node) -> str:
    """Why no update may come before ``joint``, a value computed from several gradients."""
    values = zip(program.output_values(), program.signature.outputs, strict=True)
    evidence = {value for value, output in values if output.name == FP8_EVIDENCE and isinstance(value, fx.Node)}
    if evidence.isdisjoint(_ancestors(program, {joint})):
        return f"the update needs {joint.name}, which is computed from several gradients"
    return (
        f"FP8: the step is skipped if a quantized tensor or a gradient holds Inf or NaN, so the update waits for "
        f"{joint.name}, which is computed from several gradients and NaN then"
    )


def _objection(group: UpdateGroup, waits: str | None, leaving: set[int], storages: StorageMap) -> str | None:
    """Why the gradient of ``group`` must live on, or None; ``waits``: why all updates wait for each other, if they do.

    A step whose joint value is not finite is skipped as a whole, so no update may come before it.
    """
    if waits is not None:
        return waits
    if any(ops.is_random(node) for node in group.ops):
        return "its update draws random numbers, whose order may not change"
    if any(ops.has_effect(node) for node in group.ops):
        return "its update writes in place already"
    if any(not leaving.isdisjoint(storages.held[gradient]) for gradient in group.gradients):
        return "it is an output"
    return None


def _decisions(program: Program, storages: StorageMap, group: UpdateGroup, objection: str | None) -> list[Decision]:
    """One row for each gradient of ``group``."""
    return [
        Decision(
            value=gradient.name,
            action=Action.RELEASE if objection is None else Action.KEEP,
            nbytes=sum(storages.nbytes[number] for number in storages.held[gradient]),
            seconds=0.0,
            reason=objection or f"{group.parameter} is updated as soon as it is complete",
            source=str(program.origin(gradient)),
        )
        for gradient in _gradients(group)
    ]


def _num_moved(before: tuple[fx.Node, ...], after: tuple[fx.Node, ...], groups: list[UpdateGroup]) -> int:
    """How many of ``groups`` run behind other nodes of no group than before; at least 1, for norms."""
    return max(1, sum(x != y for x, y in zip(_places(before, groups), _places(after, groups), strict=True)))


def _places(order: tuple[fx.Node, ...], groups: list[UpdateGroup]) -> list[int]:
    """For each group, how many nodes of no group (numbers left out) run before it."""
    inside = {node for group in groups for node in group.ops}
    num_before: dict[fx.Node, int] = {}
    count = 0
    for node in order:
        num_before[node] = count
        count += node not in inside and not ops.is_scalar_op(node)
    return [max(num_before[node] for node in group.ops) for group in groups]


class _Interleaving:
    """All nodes in a new order: those of no group as before, each group as soon as nothing it waits for is missing."""

    def __init__(self, before: tuple[fx.Node, ...], groups: list[UpdateGroup], storages: StorageMap) -> None:
        self._groups = groups
        self._group_of = {node: i for i, group in enumerate(groups) for node in group.ops}
        self._waits = self._all_waits(before, storages)
        self._waiting: dict[fx.Node, list[int]] = {}
        for i, waits in enumerate(self._waits):
            for node in waits:
                self._waiting.setdefault(node, []).append(i)
        self._body = set(before)
        self._done: set[fx.Node] = set()
        self._order: list[fx.Node] = []
        for node in before:
            if node not in self._group_of:
                self._run(node)
        for node in before:  # groups that wait for each other, in their old order
            self._run(node)

    @property
    def order(self) -> tuple[fx.Node, ...]:
        """The new order."""
        return tuple(self._order)

    def _all_waits(self, before: tuple[fx.Node, ...], storages: StorageMap) -> list[set[fx.Node]]:
        """For each group, the calls outside it that it reads, or that read what it overwrites."""
        overwriting: dict[int, list[int]] = {}
        for i, group in enumerate(self._groups):
            for number in {number for target in group.targets for number in storages.held[target]}:
                overwriting.setdefault(number, []).append(i)
        waits: list[set[fx.Node]] = [set() for _ in self._groups]
        for node in before:
            own = self._group_of.get(node)
            read = {number for argument in node.all_input_nodes for number in storages.held[argument]}
            for i in {i for number in read for i in overwriting.get(number, ()) if i != own}:
                waits[i].add(node)
            if own is not None:
                waits[own].update(argument for argument in node.all_input_nodes if self._is_awaited(argument, own))
        return waits

    def _is_awaited(self, argument: fx.Node, own: int) -> bool:
        """Numbers are not waited for, but computed where the first update needs them."""
        is_inside = self._group_of.get(argument) == own
        return argument.op != "placeholder" and not is_inside and not ops.is_scalar_op(argument)

    def _run(self, node: fx.Node) -> None:
        """Put ``node`` next, behind the numbers it needs, and behind it the groups that waited for it alone."""
        if node in self._done or node not in self._body:
            return
        for argument in node.all_input_nodes:
            if ops.is_scalar_op(argument):
                self._run(argument)
        self._done.add(node)
        self._order.append(node)
        for i in self._waiting.get(node, ()):
            self._waits[i].discard(node)
            if not self._waits[i]:
                for member in self._groups[i].ops:
                    self._run(member)


def _norms_behind_gradients(
    program: Program, order: tuple[fx.Node, ...], kept: list[UpdateGroup]
) -> tuple[fx.Node, ...]:
    """``order`` with what joint values read of one gradient alone right behind that gradient."""
    feeds = _ancestors(program, {node for group in kept for node in group.joint_values})
    behind = {
        gradient: [user for user in gradient.users if user in feeds and _is_digest(user, gradient)]
        for group in kept
        for gradient in group.gradients
    }
    digests = {node for nodes in behind.values() for node in nodes}
    result: list[fx.Node] = []
    for node in order:
        if node not in digests:
            result += [node, *behind.get(node, ())]
    return tuple(result)


def _is_digest(user: fx.Node, gradient: fx.Node) -> bool:
    """Whether ``user`` makes something small of ``gradient`` and of nothing else."""
    if not ops.is_pure(user) or user.all_input_nodes != [gradient]:
        return False
    value = user.meta["val"]
    return getattr(value, "nbytes", gradient.meta["val"].nbytes) < gradient.meta["val"].nbytes


def _ancestors(program: Program, sources: set[fx.Node]) -> set[fx.Node]:
    """``sources`` and the calls they are computed from (for membership tests; never iterate)."""
    found = set(sources)
    for node in reversed(program.ops()):
        if node in found:
            found.update(node.all_input_nodes)
    return found
