"""Calls that write, joined into one call that does the same for lists.

An operator ``x_`` may have a twin ``x_list_`` with the same arguments of which some are lists of what ``x_`` takes.
Calls join at the place of the first: what they read must exist there (views are moved), and nothing in between may
touch what they write.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.storage import StorageMap, storage_map


def join_list_calls(program: Program) -> int:
    """Join calls of ``program`` where that changes nothing; returns how many calls went into others."""
    joiner = _Joiner(program)
    for node in program.ops():
        joiner.see(node)
    count = 0
    for group in joiner.groups:
        if len(group.members) > 1:
            _replace(program, group)
            count += len(group.members) - 1
    return count


@dataclass(frozen=True)
class _ListForm:
    """``target`` takes lists at ``listed`` positions, and at the others what every call joined must share."""

    target: torch._ops.OpOverload
    listed: tuple[int, ...]


@dataclass
class _Group:
    """Calls that will be one, at the place of the first; storages that were read and written since then."""

    form: _ListForm
    members: list[fx.Node]
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class _Joiner:
    """Reads the calls of a program in order."""

    def __init__(self, program: Program) -> None:
        self.groups: list[_Group] = []
        self._open: dict[Any, _Group] = {}
        self._storages: StorageMap = storage_map(program)
        self._position = {node: i for i, node in enumerate(program.graph.nodes)}

    def see(self, node: fx.Node) -> None:
        """The next call."""
        form = list_form(node)
        joined = None if form is None else self._join(node, form)
        if not self._open:
            return
        written = self._held(tuple(ops.mutated_arguments(node)))
        read = self._held(tuple(node.all_input_nodes))
        for group in self._open.values():
            if group is not joined:
                group.written |= written
                group.read |= read

    def _join(self, node: fx.Node, form: _ListForm) -> _Group:
        key = (form.target, self._devices(node), tuple(a for i, a in enumerate(node.args) if i not in form.listed))
        group = self._open.get(key)
        if group is None or not self._can_join(node, group):
            group = self._open[key] = _Group(form, [])
            self.groups.append(group)
        group.members.append(node)
        return group

    def _can_join(self, node: fx.Node, group: _Group) -> bool:
        first = self._position[group.members[0]]
        if any(self._position[ops.behind_views(argument)] > first for argument in node.all_input_nodes):
            return False
        written = self._held(tuple(ops.mutated_arguments(node)))
        others = {s for member in group.members for s in self._held(tuple(member.all_input_nodes))}
        touched = self._held(tuple(node.all_input_nodes))
        return written.isdisjoint(group.read) and written.isdisjoint(others) and touched.isdisjoint(group.written)

    def _devices(self, node: fx.Node) -> tuple[str, ...]:
        values = (argument.meta["val"] for argument in ops.mutated_arguments(node))
        return tuple(dict.fromkeys(str(value.device) for value in values))

    def _held(self, nodes: tuple[fx.Node, ...]) -> set[int]:
        return {number for node in nodes for number in self._storages.held[node]}


def list_form(node: fx.Node) -> _ListForm | None:
    """How ``node`` is called for lists; None if it is not."""
    op = ops.overload(node)
    return None if op is None or node.kwargs else _list_form(op)


@functools.cache
def _list_form(op: torch._ops.OpOverload) -> _ListForm | None:
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}list_", None) if name.endswith("_") else None
    if packet is None or op._schema.returns:
        return None
    target = packet.default
    types = [str(argument.type) for argument in op._schema.arguments]
    lists = [str(argument.type) for argument in target._schema.arguments]
    listed = tuple(i for i, (one, many) in enumerate(zip(types, lists, strict=True)) if one != many)
    assert all(lists[i] == f"List[{types[i]}]" for i in listed), f"{target} does not take lists of what {op} takes"
    return _ListForm(target, listed)


def _move_views(node: fx.Node, first: fx.Node) -> None:
    """Let ``node``, and the views that it is made of, stand before ``first`` if they do not yet."""
    if node.op == "call_function" and ops.is_view(node) and first < node:
        _move_views(node.args[0], first)  # type: ignore[arg-type]
        first.prepend(node)


def _replace(program: Program, group: _Group) -> None:
    first, form = group.members[0], group.form
    for member in group.members:
        for argument in member.all_input_nodes:
            _move_views(argument, first)
    arguments = [
        [member.args[i] for member in group.members] if i in form.listed else argument
        for i, argument in enumerate(first.args)
    ]
    program.insert_before(first, form.target, *arguments, origin_of=first)
    for member in group.members:
        program.erase_if_unused(member)
