"""Alias-aware liveness: when each storage is allocated and freed, and the peak that follows.

The order is the graph's own. Inputs and constants belong to the caller and are never freed. A value that updates an
input (a parameter, a state) is written into it as soon as nothing reads the old content any more, and dies there;
buffer updates are written when everything has succeeded, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.spec import UPDATE_KINDS, InputKind, OutputKind
from graphopt.ir.storage import StorageMap, resident_bytes, storage_map
from graphopt.ir.twins import is_twin
from graphopt.ir.update_targets import update_targets

Workspace = Callable[[fx.Node], int]
"""Bytes that an operator allocates and frees inside itself, beyond its results."""


@dataclass(frozen=True)
class WriteBack:
    """``value`` is copied into the input ``target``."""

    value: fx.Node
    target: fx.Node


@dataclass(frozen=True)
class MemoryPlan:
    """Order, last uses and the peak.

    ``free_after[i]``: nodes whose names are deleted after ``order[i]``; ``write_after[i]``: updates written there
    (before the deletions); ``write_at_end``: updates written when all has succeeded. ``peak_bytes`` is above
    ``resident_bytes`` (inputs, but for far ones, and constants); ``live_bytes[i]`` is what is held while ``order[i]``
    runs.
    """

    order: tuple[fx.Node, ...]
    free_after: tuple[tuple[fx.Node, ...], ...]
    write_after: tuple[tuple[WriteBack, ...], ...]
    write_at_end: tuple[WriteBack, ...]
    peak_bytes: int
    peak_at: fx.Node | None
    live_bytes: tuple[int, ...]
    resident_bytes: int


def no_workspace(node: fx.Node) -> int:
    """The Workspace that assumes operators allocate nothing but their results."""
    return 0


def plan_memory(
    program: Program, *, workspace: Workspace = no_workspace, storages: StorageMap | None = None
) -> MemoryPlan:
    """The MemoryPlan of ``program`` in its own order; ``storages``: those it will have, if not those it has."""
    storages = storages or storage_map(program)
    order = program.ops()
    index = {node: i for i, node in enumerate(order)}
    write_after, write_at_end = _write_points(program, storages, index)
    last_use = _last_uses(program, index, write_after, write_at_end)
    free_after: list[list[fx.Node]] = [[] for _ in order]
    for node in order:
        if node in last_use:
            free_after[last_use[node]].append(node)
    live = _simulate(storages, order, free_after, workspace)
    peak = max(live, default=0)
    return MemoryPlan(
        order=order,
        free_after=tuple(tuple(nodes) for nodes in free_after),
        write_after=tuple(tuple(writes) for writes in write_after),
        write_at_end=tuple(write_at_end),
        peak_bytes=peak,
        peak_at=order[live.index(peak)] if live else None,
        live_bytes=tuple(live),
        resident_bytes=resident_bytes(program, storages),
    )


def saved_for_backward(program: Program, *, storages: StorageMap | None = None) -> tuple[fx.Node, ...]:
    """Values that the forward part leaves for the backward part, one node a storage, in order of definition."""
    split = forward_end(program)
    order = program.ops()
    storages = storages or storage_map(program)
    position = {node: i for i, node in enumerate(order)}
    seen: set[int] = set(storages.resident)
    saved = []
    for node in order[:split]:
        fresh = set(storages.held[node]) - seen
        if fresh and any(position.get(user, split) >= split for user in node.users if user.op != "output"):
            seen |= fresh
            saved.append(node)
    return tuple(saved)


def saved_bytes(program: Program, *, storages: StorageMap | None = None) -> int:
    """Bytes of the storages that the forward part leaves for the backward part."""
    storages = storages or storage_map(program)
    held = {number for node in saved_for_backward(program, storages=storages) for number in storages.held[node]}
    return sum(storages.nbytes[number] for number in held - storages.resident)


def forward_end(program: Program) -> int:
    """How many of ``program.ops()`` belong to the forward part: all up to the first that a tangent reaches.

    Calls that run again right before that one do so for the backward part, and belong to it.
    """
    backward = backward_nodes(program)
    order = program.ops()
    split = next((i for i, node in enumerate(order) if node in backward), len(order))
    while 0 < split < len(order) and is_twin(order[split - 1]):
        split -= 1
    return split


def backward_nodes(program: Program) -> set[fx.Node]:
    """The nodes reachable from a tangent input (for membership tests; never iterate)."""
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    return reached_from(program, (node for node, entry in inputs if entry.kind is InputKind.TANGENT))


def reached_from(program: Program, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """``sources`` and what is computed from them (for membership tests; never iterate)."""
    found = set(sources)
    for node in program.ops():
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def is_unpacked_at_once(node: fx.Node) -> bool:
    """Whether ``node`` returns a tuple whose elements are all that is used, each under one name."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return False
    positions = [user.args[1] for user in node.users if ops.is_getitem(user)]
    return len(positions) == len(node.users) and len(set(positions)) == len(positions)


def _write_points(
    program: Program, storages: StorageMap, index: dict[fx.Node, int]
) -> tuple[list[list[WriteBack]], list[WriteBack]]:
    write_after: list[list[WriteBack]] = [[] for _ in index]
    at_end: list[WriteBack] = []
    readers = _last_readers(program, storages, index)
    for update in update_targets(program):
        value, target = update.value, update.target
        if storages.shares(value, target):
            continue
        if update.output.kind in (OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE) or value not in index:
            at_end.append(WriteBack(value, target))
            continue
        written = max([index[value], *(readers.get(number, -1) for number in storages.held[target])])
        write_after[written].append(WriteBack(value, target))
    return write_after, at_end


def _last_readers(program: Program, storages: StorageMap, index: dict[fx.Node, int]) -> dict[int, int]:
    """For each storage, the position of the last call that reads or writes it."""
    last: dict[int, int] = {}
    for node in index:
        for argument in node.all_input_nodes:
            for number in storages.held[argument]:
                last[number] = index[node]
    return last


def _last_uses(
    program: Program,
    index: dict[fx.Node, int],
    write_after: list[list[WriteBack]],
    write_at_end: list[WriteBack],
) -> dict[fx.Node, int]:
    """The position after which each call's name can be deleted; values that leave the program have none."""
    last_use = {node: max([index[user] for user in node.users if user in index] + [index[node]]) for node in index}
    returned = {
        value
        for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
        if output.kind not in UPDATE_KINDS and isinstance(value, fx.Node)
    }
    for position, writes in enumerate(write_after):
        for write in writes:
            last_use[write.value] = max(last_use[write.value], position)
    for node in nodes_in((*returned, *(write.value for write in write_at_end))):
        last_use.pop(node, None)
    # A tuple is unpacked as soon as it is made, so its name never lives on.
    for node in index:
        if node in last_use and is_unpacked_at_once(node):
            last_use[node] = index[node]
    return last_use


def _simulate(
    storages: StorageMap, order: tuple[fx.Node, ...], free_after: list[list[fx.Node]], workspace: Workspace
) -> list[int]:
    """Bytes held above the resident ones while each call runs."""
    holders: dict[int, int] = {}
    live_bytes = 0
    history = []
    unpacked_early = _unpacked_with_tuple(order)
    already_held = {getitem for getitems in unpacked_early.values() for getitem in getitems}
    for node, freed in zip(order, free_after, strict=True):
        made = () if node in already_held else (node, *unpacked_early.get(node, ()))
        for number in (number for holder in made for number in storages.held[holder]):
            if number in storages.resident:
                continue
            if not holders.get(number):
                live_bytes += storages.nbytes[number]
            holders[number] = holders.get(number, 0) + 1
        history.append(live_bytes + workspace(node))
        for gone in freed:
            for number in storages.held[gone]:
                if number in storages.resident:
                    continue
                holders[number] -= 1
                if not holders[number]:
                    live_bytes -= storages.nbytes[number]
    return history


def _unpacked_with_tuple(order: tuple[fx.Node, ...]) -> dict[fx.Node, list[fx.Node]]:
    """The getitems that take effect when their tuple is made."""
    unpacked: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if is_unpacked_at_once(node):
            unpacked[node] = list(node.users)
    return unpacked
