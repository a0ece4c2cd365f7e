"""Which values can leave for far memory between forward and backward, and the reason against those that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.storage import storage_map, tensors_in


def offloadable(program: Program, node: fx.Node) -> str | None:
    """The reason why ``node`` cannot be offloaded, or None if it can. For many values, ask one OffloadFacts."""
    return OffloadFacts(program).objection(node)


class OffloadFacts:
    """Where the memory of each value is made, shown through views and read again; positions are those of ``ops()``.

    A whole storage leaves, under the name of its base: the first value in it. Views of the base are made again from
    what comes back.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.order = program.ops()
        self.position = {node: i for i, node in enumerate(self.order)}
        self.split = forward_end(program)
        storages = storage_map(program)
        self._held = storages.held
        self._nbytes = storages.nbytes
        self._resident = storages.resident
        self._members: dict[int, list[fx.Node]] = {}
        for node, numbers in storages.held.items():
            for number in numbers:
                self._members.setdefault(number, []).append(node)
        makers = [any(self._members[number][0] is node for number in self._held[node]) for node in self.order]
        self._num_makers = tuple(accumulate(makers, initial=0))
        self._returned = self._numbers(nodes_in(program.output_values()))
        self._written = self._numbers(target for node in self.order for target in ops.mutated_arguments(node))

    def members(self, base: fx.Node) -> tuple[fx.Node, ...]:
        """The values in the memory of ``base`` that the forward part makes, in order; ``base`` is the first."""
        return tuple(
            node for node in self._members[self._held[base][0]] if self.position.get(node, self.split) < self.split
        )

    def late_users(self, base: fx.Node) -> tuple[fx.Node, ...]:
        """The calls behind the forward part that read the memory of ``base`` through a value of the forward part."""
        users = {user for member in self.members(base) for user in member.users if user in self.position}
        return tuple(
            sorted((user for user in users if self.position[user] >= self.split), key=self.position.__getitem__)
        )

    def late_members(self, base: fx.Node) -> tuple[fx.Node, ...]:
        """The views of ``base`` that are made behind the forward part, in order."""
        return tuple(node for node in self._members[self._held[base][0]] if self.position.get(node, -1) >= self.split)

    def last_forward_use(self, base: fx.Node) -> int:
        """The position of the last call of the forward part that makes ``base`` or reads its memory.

        Views that only the backward reads do not count: they are made again there.
        """
        members = self.members(base)
        readers: set[fx.Node] = set()
        for member in reversed(members):
            early = (user for user in member.users if self.position.get(user, self.split) < self.split)
            readers.update(user for user in early if user not in members or user.users.keys() & readers)
        return max([self.position[base], *map(self.position.__getitem__, readers)])

    def makes_memory(self, start: int, end: int) -> bool:
        """Whether any call from ``start`` to ``end`` (exclusive) has a result in memory of its own."""
        return self._num_makers[max(end, start)] > self._num_makers[start]

    def behind(self, position: int) -> fx.Node:
        """The call before which a new one must stand to come after the one at ``position`` and its getitems."""
        position += 1
        while ops.is_getitem(self.order[position]):
            position += 1
        return self.order[position]

    def objection(self, node: fx.Node) -> str | None:
        """The reason why ``node`` cannot be offloaded, or None if it can."""
        if node.op != "call_function":
            return "it belongs to the caller, who keeps its memory anyway"
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return "it is not one strided tensor"
        number = self._held[node][0]
        return (
            self._ownership_objection(node, number)
            or self._layout_objection(value, number)
            or self._use_objection(node)
        )

    def _ownership_objection(self, node: fx.Node, number: int) -> str | None:
        if number in self._resident:
            return "it shows memory of an input or a constant, which the caller keeps anyway"
        if number in self._returned:
            return "it shares memory with an output"
        if number in self._written:
            return "its memory is written in place"
        base = next(member for member in self._members[number] if _is_tensor(member))
        if base is not node:
            return f"it is a view of {base.name}, whose memory would have to leave: offload that"
        return None

    def _layout_objection(self, value: torch.Tensor, number: int) -> str | None:
        if value.is_conj() or value.is_neg():
            return "it is a lazy conjugate or negative"
        if not self._nbytes[number]:
            return "it holds no bytes"
        last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        if value.storage_offset() or (last + 1) * value.element_size() != self._nbytes[number]:
            return "its memory is larger than the value"
        return None

    def _use_objection(self, node: fx.Node) -> str | None:
        if self.position[node] >= self.split:
            return "it is made by the backward"
        if ops.is_transfer(node):
            return "it belongs to another transfer"
        late = self.late_users(node)
        if not late:
            return "only the forward reads it"
        if self.position[late[0]] == self.split:
            return "the first operator of the backward reads it: it would be needed again before it has left"
        for member in self.members(node):
            if any(user in late for user in member.users) and view_chain(node, member) is None:
                return f"{member.name} shares its memory without being a view that could be made again"
        return None

    def _numbers(self, nodes: Iterator[fx.Node] | tuple[fx.Node, ...]) -> set[int]:
        return {number for node in nodes for number in self._held[node]}


def view_chain(base: fx.Node, member: fx.Node) -> tuple[fx.Node, ...] | None:
    """The views (and picks of one of several) that lead from ``base`` to ``member``, in order; None if others do."""
    chain: list[fx.Node] = []
    node = member
    while node is not base:
        if not (ops.is_view(node) or ops.is_getitem(node)) or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        chain.append(node)
        node = node.args[0]
    return tuple(reversed(chain))


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and next(tensors_in(value), None) is not None
