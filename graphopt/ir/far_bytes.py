"""How much far memory a program needs: a value holds its bytes from its departure to the death of its ticket."""

from __future__ import annotations

import torch

from graphopt.ir import ops
from graphopt.ir.liveness import MemoryPlan, plan_memory
from graphopt.ir.program import Program
from graphopt.ir.storage import storage_map
from graphopt.ir.transfer_ops import OFFLOAD


def far_peak_bytes(program: Program, plan: MemoryPlan | None = None) -> int:
    """The most bytes that one run of ``program`` holds in far memory, by the plan of its own order.

    Each forward that waits for its backward holds as much again of what it has sent.
    """
    plan = plan or plan_memory(program)
    storages = storage_map(program)
    sent: dict[int, int] = {}
    holders: dict[int, int] = {}
    level = peak = 0
    for node, freed in zip(plan.order, plan.free_after, strict=True):
        for number in storages.held[node]:
            holders[number] = holders.get(number, 0) + 1
        if ops.is_call(node, OFFLOAD):
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            assert isinstance(value, torch.Tensor), "what leaves is a tensor"
            (number,) = storages.held[node]
            sent[number] = int(value.untyped_storage().nbytes())
            level += sent[number]
            peak = max(peak, level)
        for number in (number for gone in freed for number in storages.held[gone]):
            holders[number] -= 1
            if not holders[number]:
                level -= sent.pop(number, 0)
    return peak
