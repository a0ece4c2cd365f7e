"""From which operator to which each storage is held, as the plan frees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.ir.liveness import MemoryPlan, is_unpacked_at_once
from graphopt.ir.storage import StorageMap


@dataclass(frozen=True)
class Lifetime:
    """Positions in the plan's order of the first and the last operator that runs while the storage is held.

    ``holders``: the nodes that refer to it, in order of definition.
    """

    first: int
    last: int
    holders: tuple[fx.Node, ...]

    def is_alive_at(self, position: int) -> bool:
        """Whether the storage is held while the operator at ``position`` runs."""
        return self.first <= position <= self.last


def storage_lifetimes(plan: MemoryPlan, storages: StorageMap) -> dict[int, Lifetime]:
    """The Lifetime of every storage that the program itself allocates, by number, in order of definition."""
    freed_at = {node: position for position, nodes in enumerate(plan.free_after) for node in nodes}
    end = len(plan.order) - 1
    holders: dict[int, list[fx.Node]] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    made_at = {node: position for position, node in enumerate(plan.order)}
    for node in plan.order:
        made = made_at[_maker(node)]
        for number in storages.held[node]:
            if number in storages.resident:
                continue
            holders.setdefault(number, []).append(node)
            first[number] = min(first.get(number, made), made)
            last[number] = max(last.get(number, 0), freed_at.get(node, end))
    return {number: Lifetime(first[number], last[number], tuple(nodes)) for number, nodes in holders.items()}


def _maker(node: fx.Node) -> fx.Node:
    """The operator whose call brings ``node`` about: its tuple, if that is unpacked as soon as it is made."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and is_unpacked_at_once(source) and node in source.users:
        return source
    return node
