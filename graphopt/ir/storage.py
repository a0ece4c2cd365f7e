"""Which memory each node holds: views, in-place results and multi-output tuples share or join storages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir.program import Program


@dataclass(frozen=True)
class StorageMap:
    """Storages of a Program, numbered in order of definition.

    ``held``: node to the numbers of the storages it refers to (a tuple-valued node refers to several).
    ``nbytes``: bytes of each storage, gaps included. ``resident``: storages of inputs and constants, which the caller
    owns and which are never freed by the program.
    """

    held: dict[fx.Node, tuple[int, ...]]
    nbytes: tuple[int, ...]
    resident: frozenset[int]

    def shares(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether two nodes refer to a common storage."""
        return not set(self.held[left]).isdisjoint(self.held[right])


def storage_map(program: Program) -> StorageMap:
    """The StorageMap of ``program``, from the identity of the storages of its fake values."""
    numbers: dict[int, int] = {}
    nbytes: list[int] = []
    held: dict[fx.Node, tuple[int, ...]] = {}
    resident: set[int] = set()
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        found = []
        for tensor in tensors_in(node.meta.get("val")):
            storage = tensor.untyped_storage()
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(nbytes)
                nbytes.append(int(storage.nbytes()))
            found.append(numbers[storage._cdata])
        held[node] = tuple(dict.fromkeys(found))
        if node.op in ("placeholder", "get_attr"):
            resident.update(held[node])
    return StorageMap(held, tuple(nbytes), frozenset(resident))


def near_resident(program: Program, storages: StorageMap) -> tuple[int, ...]:
    """The resident storages that lie in ordinary memory, in order; inputs that are far are left out."""
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    far = {number for node, entry in inputs if entry.is_far for number in storages.held[node]}
    return tuple(sorted(storages.resident - far))


def resident_bytes(program: Program, storages: StorageMap) -> int:
    """Bytes of inputs and constants in ordinary memory."""
    return sum(storages.nbytes[number] for number in near_resident(program, storages))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
