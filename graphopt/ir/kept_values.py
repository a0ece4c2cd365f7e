"""What the forward part of a functional program leaves for the backward part, each value with what reads it there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program
from graphopt.ir.storage import storage_map


@dataclass(frozen=True)
class LateUse:
    """``user``, a call of the backward part, reads ``value``: the kept value itself or a view of it."""

    user: fx.Node
    value: fx.Node


@dataclass(frozen=True)
class ForwardValue:
    """One storage that the forward part makes.

    ``base``: the first tensor in it; ``holders``: all nodes that refer to it, in order, those of the backward part
    included; ``uses``: the calls of the backward part that read it, views left out; ``is_returned``: it leaves the
    program, and so is held to its end; ``nbytes``: of the storage.
    """

    base: fx.Node
    holders: tuple[fx.Node, ...]
    uses: tuple[LateUse, ...]
    is_returned: bool
    nbytes: int

    @property
    def is_kept(self) -> bool:
        """Whether it is there when the backward part begins."""
        return bool(self.uses)


def forward_values(program: Program) -> tuple[ForwardValue, ...]:
    """The storages that the forward part of ``program`` allocates, in order of definition."""
    storages = storage_map(program)
    order = program.ops()
    split = forward_end(program)
    late = set(order[split:])
    holders: dict[int, list[fx.Node]] = {}
    for position, node in enumerate(order):
        for number in storages.held[node]:
            if number not in storages.resident and (position < split or number in holders):
                holders.setdefault(number, []).append(node)
    found = []
    for number, nodes in holders.items():
        base = next((node for node in nodes if isinstance(node.meta["val"], torch.Tensor)), None)
        if base is None:
            continue  # a result that nothing picks
        uses = tuple(_uses(nodes, late))
        is_returned = any(user.op == "output" for node in nodes for user in node.users)
        found.append(ForwardValue(base, tuple(nodes), uses, is_returned, storages.nbytes[number]))
    return tuple(found)


def _uses(holders: list[fx.Node], late: set[fx.Node]) -> Iterator[LateUse]:
    own = set(holders)
    for value in holders:
        for user in value.users:
            if user in late and user not in own:
                yield LateUse(user, value)
