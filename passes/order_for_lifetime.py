"""Order for lifetime: operators run where least is held while they wait, or while their results do.

Before::

    wide = aten.exp.default(x)              # needed at the very end
    ...
    total = aten.sum.default(hidden)        # frees hidden, and could have run as soon as hidden was there
    out = aten.mul.Tensor(total, wide)

After::

    total = aten.sum.default(hidden)        # right behind its last argument
    ...
    wide = aten.exp.default(x)              # right before its first user
    out = aten.mul.Tensor(total, wide)

An operator that makes more than it frees sinks to its first user; one that frees more than it makes rises to its last
argument. Saves the difference between its old and its new place. Costs nothing: the same operators run on the same
values. Bytes are those of the program that ``reuse-last-use`` will leave.

Nothing passes from the forward part into the backward part, so what is saved for backward stays the same. Effects,
random draws, outputs and writes into the caller's memory keep their order. An operator that may allocate memory inside
itself only moves to where less is held than where it was. Near-linear: two sweeps of local gains, then one plan; if the
peak of that plan were higher, everything would stay as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir.lifetime_sweeps import improved_order
from graphopt.ir.lifetimes import lifetimes_of
from graphopt.ir.liveness import MemoryPlan, plan_memory
from graphopt.ir.ordering import body, reorder
from graphopt.ir.program import Program, Stage
from graphopt.ir.reuse import PlannedReuse, planned_reuse
from graphopt.ir.storage import StorageMap, storage_map
from graphopt.pipeline.pass_base import Changes, Pass


@dataclass(frozen=True)
class OrderForLifetime(Pass):
    """Reorder operators so that less is held between them."""

    name: ClassVar[str] = "order-for-lifetime"
    stage: ClassVar[Stage] = Stage.STEP
    after: ClassVar[tuple[str, ...]] = ("release-gradients",)

    def apply(self, program: Program) -> Changes:
        """Sweep until nothing is gained: each round lowers the bytes held, summed over all operators."""
        before = current = body(program)
        storages = storage_map(program)
        held = _Held.by(program, storages)
        while True:
            levels = dict(zip(held.plan.order, held.plan.live_bytes, strict=True))
            improved = improved_order(lifetimes_of(program, held.reuse), levels=levels)
            if improved == current:
                break
            reorder(program, improved)
            now_held = _Held.by(program, storages)
            if not now_held.is_less_than(held):
                reorder(program, current)
                break
            current, held = improved, now_held
        return Changes(_num_moved(before, current))


@dataclass(frozen=True)
class _Held:
    """What a program in its present order will hold once it writes in place."""

    reuse: PlannedReuse
    plan: MemoryPlan

    @classmethod
    def by(cls, program: Program, storages: StorageMap) -> _Held:
        reuse = planned_reuse(program, storages)
        return cls(reuse, plan_memory(program, storages=reuse.storages))

    def is_less_than(self, other: _Held) -> bool:
        """Whether less is held on the whole, and not more at the peak."""
        is_lower = sum(self.plan.live_bytes) < sum(other.plan.live_bytes)
        return is_lower and self.plan.peak_bytes <= other.plan.peak_bytes


def _num_moved(before: tuple[fx.Node, ...], after: tuple[fx.Node, ...]) -> int:
    """How many nodes follow another node than before."""
    followed = dict(zip(before[1:], before, strict=False))
    return sum(followed.get(node) is not previous for previous, node in zip((None, *after), after, strict=False))
