"""Replace what is computed from constants alone by its value, where the value is small.

Before::

    arange: 'i64[16]' = aten.arange.default(16)
    add: 'i64[16]' = aten.add.Tensor(arange, 1)
    mul: 'f32[16]' = aten.mul.Tensor(x, add)

After (the ops that fed ``add`` become dead; ``drop-dead`` removes them)::

    folded_0: 'i64[16]' = constant.folded_0
    mul: 'f32[16]' = aten.mul.Tensor(x, folded_0)

Only the last op of a constant region is replaced. A factory alone, such as ``arange``, stays: other passes recognise
it. A view of a constant stays: it costs nothing. What is returned stays computed, because a caller may write into it.

Saves one kernel a folded op and step. Costs at most ``max_bytes`` per folded value that stay in memory for ever, and
one run of the ops while compiling. Refuses larger values, unless folding frees as much in stored constants: computing
them again costs little, keeping them costs memory at the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.constants import ConstantValues, NotConstant
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.storage import StorageMap, storage_map
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

LARGEST_STORED_BYTES = 64 << 10
"""The constants of captured transformers models (Llama, Qwen3, Mistral, GPT-2, T5) are of two kinds: one number a
position (4 or 8 bytes each: 64 KiB is 8,192 positions) and one a pair of positions (1 MiB and more for 1,024)."""


@dataclass(frozen=True)
class FoldConstants(Pass):
    """See the module's docstring. ``max_bytes``: the largest value that is stored."""

    name: ClassVar[str] = "fold-constants"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    max_bytes: int = LARGEST_STORED_BYTES

    def apply(self, program: Program) -> Changes:
        """Fold the last small op of every constant region."""
        constants = ConstantValues(program)
        storages = storage_map(program)
        regions = _find_regions(program, constants, storages, self.max_bytes)
        refusals = list(regions.refusals)
        count = 0
        for node in regions.foldable:
            value = constants.value(node)
            if isinstance(value, NotConstant):
                refusals.append(Refusal.at(node, f"{node.name} {value.reason}"))
                continue
            program.replace(node, program.insert_constant(node, value, name="folded"))
            count += 1
        if count:
            program.refresh()  # views of a folded value must share the memory of the constant
        return Changes(count, tuple(refusals))


@dataclass(frozen=True)
class _Regions:
    """Nodes to fold, last first, and those declined although a region ends there."""

    foldable: tuple[fx.Node, ...]
    refusals: tuple[Refusal, ...]


def _find_regions(program: Program, constants: ConstantValues, storages: StorageMap, max_bytes: int) -> _Regions:
    """Backwards: a constant is worth storing if something reads it that stays; then what it reads need not stay."""
    returned = {number for value in nodes_in(program.output_values()) for number in storages.held[value]}
    read = set(nodes_in(program.output_values()))
    ends = set(read)  # read by something that is not constant
    foldable: list[fx.Node] = []
    refusals: list[Refusal] = []
    for node in reversed(program.ops()):
        if constants.why_not(node) is not None:
            read.update(node.all_input_nodes)
            ends.update(node.all_input_nodes)
            continue
        if node not in read:
            continue
        is_candidate = _makes_new_tensor(node, storages) and returned.isdisjoint(storages.held[node])
        if is_candidate and _is_worth_storing(program, node, max_bytes):
            foldable.append(node)
            continue
        if is_candidate and node in ends:
            refusals.append(Refusal.at(node, _too_large(program, node, max_bytes)))
        read.update(node.all_input_nodes)
        if node in ends and not is_candidate:
            ends.update(node.all_input_nodes)
    return _Regions(tuple(foldable), tuple(refusals))


def _makes_new_tensor(node: fx.Node, storages: StorageMap) -> bool:
    """Whether ``node`` computes one tensor in memory of its own, from more than sizes and numbers."""
    if ops.is_factory(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return not any(storages.shares(node, argument) for argument in node.all_input_nodes)


def _is_worth_storing(program: Program, node: fx.Node, max_bytes: int) -> bool:
    result_bytes = program.spec(node).nbytes
    return result_bytes <= max_bytes or result_bytes <= _freed_bytes(program, node)


def _freed_bytes(program: Program, node: fx.Node) -> int:
    """Bytes of stored constants that only ``node`` reads; one tensor may be stored under several names."""
    read_by_others = {
        program.constant(constant).untyped_storage()._cdata
        for constant in program.constants()
        if any(user is not node for user in constant.users)
    }
    storages = {
        program.constant(constant).untyped_storage()._cdata: program.constant(constant).untyped_storage().nbytes()
        for constant in program.constants()
        if node in constant.users
    }
    return sum(nbytes for storage, nbytes in storages.items() if storage not in read_by_others)


def _too_large(program: Program, node: fx.Node, max_bytes: int) -> str:
    result_bytes = program.spec(node).nbytes
    operand_bytes = sum(program.spec(argument).nbytes for argument in node.all_input_nodes)
    return (
        f"constant of {result_bytes} bytes, above max_bytes={max_bytes}: stored, it would stay in memory for ever; "
        f"it is computed from {operand_bytes} bytes when needed"
    )
