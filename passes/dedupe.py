"""Dedupe: what is computed twice from the same values is computed once.

Before::

    scores: 'f32[8,8]' = aten.mm.default(query, key)
    again: 'f32[8,8]' = aten.mm.default(query, key)
    both: 'f32[8,8]' = aten.add.Tensor(scores, again)

After::

    scores: 'f32[8,8]' = aten.mm.default(query, key)
    both: 'f32[8,8]' = aten.add.Tensor(scores, scores)

Two calls are equal if operator, arguments (1, 1.0, True and -0.0 are four different arguments) and the specs of their
results are equal, and the operator is pure: never random, never uninitialised memory, no effect, and not on two sides
of a write.

Saves: for each merge, the time of one call, and ``numel * itemsize`` bytes while both values lived.
Costs: memory, if the first value would otherwise have died before the second is made. A merge is made only where it
costs none: the peak never rises.

Refuses: a merge that would keep more than 4 KiB alive from forward to backward which is not kept so already (a value
recomputed in backward is recomputed for a reason); a merge that would raise the peak; one that would turn two outputs
which are independent tensors into one; and, at stage "forward", values through which gradients flow: their gradient
``g1 @ w + g2 @ w`` would become ``(g1 + g2) @ w``, which rounds differently. The same pass merges those once the
gradients exist. Refusals of values up to 4 KiB are not reported.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import MemoryPlan, forward_end, plan_memory
from graphopt.ir.merging import Merger
from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec
from graphopt.ir.storage import storage_map
from graphopt.pipeline.pass_base import Changes, Pass, Refusal, until_stable

TINY_BYTES = 4096
"""What a merge may add to the values kept for backward: one page, less than the bookkeeping of a tensor is worth."""


@dataclass(frozen=True)
class Dedupe(Pass):
    """Common subexpressions are computed once."""

    name: ClassVar[str] = "dedupe"

    def apply(self, program: Program) -> Changes:
        """Merge in graph order, so that calls whose arguments became equal are found in the same walk."""
        return until_stable(program, _dedupe_once)


def _dedupe_once(program: Program) -> Changes:
    merger = Merger(program)
    budget = _MemoryBudget(program, merger)
    writes = _Writes(merger)
    latest: dict[Hashable, fx.Node] = {}
    count = 0
    refusals = []
    for node in (*program.constants(), *program.ops()):
        merger.settle(node)
        key = _key(node, writes)
        writes.note(node)
        twin = latest.get(key) if key is not None else None
        if twin is None:
            latest[key] = node
            continue
        objection = merger.objection(node, twin) or budget.objection(node, twin)
        if objection is None:
            budget.hold(node, twin)
            merger.merge(node, twin)
            count += 1
            continue
        latest[key] = node
        if sum(budget.nbytes(node)) > TINY_BYTES:
            refusals.append(Refusal.at(node, f"equals {twin.name}, but {objection}"))
    return Changes(count, tuple(refusals))


def _key(node: fx.Node, writes: _Writes) -> Hashable:
    """Equal for two nodes exactly if they compute the same; None where that cannot be said."""
    if node.op == "get_attr":
        return ("constant", node.target)
    if not ops.is_pure(node):
        return None
    kwargs = sorted(node.kwargs.items())
    try:
        key = (node.target, _frozen(node.args), _frozen(kwargs), _spec(node.meta["val"]), writes.before(node))
        hash(key)
    except TypeError:  # an argument that cannot be compared, such as a generator
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """``value`` as a key in which numbers of different type or sign differ, and NaN equals NaN."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, slice):
        return ("slice", _frozen((value.start, value.stop, value.step)))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    return (type(value), value)


def _spec(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_spec(item) for item in value)
    return type(value).__name__


class _Writes:
    """How often each memory was written so far; all zero in a functional Program."""

    def __init__(self, merger: Merger) -> None:
        self._merger = merger
        self._count: dict[int, int] = {}

    def before(self, node: fx.Node) -> tuple[int, ...]:
        """The number of writes that the memory of each argument has seen."""
        memory = (number for argument in node.all_input_nodes for number in self._merger.memory(argument))
        return tuple(self._count.get(number, 0) for number in memory)

    def note(self, node: fx.Node) -> None:
        """Count what ``node`` writes."""
        for argument in ops.mutated_arguments(node):
            for number in self._merger.memory(argument):
                self._count[number] = self._count.get(number, 0) + 1


class _MemoryBudget:
    """Whether a value may be held longer without raising the peak or what is saved for backward."""

    def __init__(self, program: Program, merger: Merger) -> None:
        storages = storage_map(program)
        plan = plan_memory(program)
        self._merger = merger
        self._nbytes = storages.nbytes
        self._resident = storages.resident
        self._peak = plan.peak_bytes
        self._live = np.array(plan.live_bytes, dtype=np.int64)
        self._position = {node: i for i, node in enumerate(plan.order)}
        self._forward_end = forward_end(program)
        self._held_until = _held_until(plan, storages.held, len(storages.nbytes))

    def nbytes(self, node: fx.Node) -> list[int]:
        """Bytes of each storage that ``node`` holds."""
        return [self._nbytes[number] for number in self._merger.memory(node)]

    def objection(self, node: fx.Node, twin: fx.Node) -> str | None:
        """Why ``twin`` cannot be held until ``node`` and beyond, or None if it can."""
        added = 0
        needed_from = self._position.get(node, 0)
        first = needed_from
        for number in self._lengthened(node, twin):
            added += self._nbytes[number]
            first = min(first, self._held_until[number] + 1)
        if added > TINY_BYTES and first <= self._forward_end <= needed_from:
            return f"would keep {added} bytes alive from forward to backward"
        if added and int(self._live[first:needed_from].max(initial=0)) + added > self._peak:
            return f"holding {added} bytes until then would raise the peak"
        return None

    def hold(self, node: fx.Node, twin: fx.Node) -> None:
        """Note that ``twin`` takes the place of ``node``; call it before they are merged."""
        needed_from = self._position.get(node, 0)
        for number in self._lengthened(node, twin):
            self._live[self._held_until[number] + 1 : needed_from] += self._nbytes[number]
        for late, early in zip(self._merger.memory(node), self._merger.memory(twin), strict=True):
            self._held_until[early] = max(self._held_until[early], self._held_until[late])

    def _lengthened(self, node: fx.Node, twin: fx.Node) -> list[int]:
        needed_from = self._position.get(node, 0)
        held = (number for number in self._merger.memory(twin) if number not in self._resident)
        return [number for number in held if self._held_until[number] < needed_from]


def _held_until(plan: MemoryPlan, held: dict[fx.Node, tuple[int, ...]], num_storages: int) -> list[int]:
    """For each storage, the position of the last call during which it is held; what is returned is held to the end."""
    until = [-1] * num_storages
    freed = {node: i for i, nodes in enumerate(plan.free_after) for node in nodes}
    for node in plan.order:
        for number in held[node]:
            until[number] = max(until[number], freed.get(node, len(plan.order)))
    return until
