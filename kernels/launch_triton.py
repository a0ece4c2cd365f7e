"""How the kernels over lists of parameters are launched: tiles, tables, scalars, and what a launch is compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from graphopt.kernels.block_maps import MAPS
from graphopt.kernels.block_update import BlockOptions, FlatItem
from graphopt.kernels.cpu_calls import item_rows, trees

# The pointers of a kernel; where they lie is told by the table and compiles nothing new.
POINTERS = ("tile_items_ptr", "table_ptr", "scalars_ptr", "factor_ptr", "trees_ptr")
# Elements of a tile and of a thread: wide loads of every tensor, registers to spare on each target.
ELEMENTS_OF_A_TILE = 1024
ELEMENTS_OF_A_THREAD = 8
MOST_WARPS = 32
MOST_REGISTERS = 128
REGISTERS_OF_A_MULTIPROCESSOR = 65536
# Where every tensor must lie for wide loads.
ALIGNMENT_BYTES = 16
MOST_TILE_TABLES = 64


@dataclass(frozen=True)
class Tiling:
    """A tile is ``blocks`` blocks of ``block`` elements, each padded to ``padded``, worked on by ``warps`` warps."""

    block: int
    padded: int
    blocks: int
    warps: int

    @classmethod
    def of(cls, block: int) -> Tiling:
        padded = 1 << (block - 1).bit_length()
        blocks = max(1, ELEMENTS_OF_A_TILE // padded)
        warps = blocks * padded // (32 * ELEMENTS_OF_A_THREAD)
        return cls(block, padded, blocks, min(MOST_WARPS, max(1, warps)))

    @property
    def elements(self) -> int:
        return self.block * self.blocks


def launch(
    kernel: Any,
    items: Sequence[FlatItem],
    scalars: Sequence[float],
    options: BlockOptions,
    factor: Tensor | None,
    choices: Mapping[str, bool],
) -> None:
    """One launch of ``kernel`` for all ``items``, which lie on one device."""
    tiling = Tiling.of(options.block)
    rows = item_rows(items, tiling.elements)
    if not rows:
        return
    device = items[0].parameter.device
    tile_items = tile_table(tuple(row[6] for row in rows), tiling.elements, device)
    numbers = torch.tensor((*scalars, 1.0), dtype=torch.float32).to(device, non_blocking=True)
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    with on_device(device):
        kernel[(tile_items.numel(),)](
            tile_items,
            table,
            numbers,
            numbers[len(scalars) :] if factor is None else factor,
            device_trees(device),
            **compiled_for(tiling, options, is_aligned=is_aligned(items, tiling)),
            **choices,
            **launch_options(tiling),
        )


def compiled_for(tiling: Tiling, options: BlockOptions, *, is_aligned: bool) -> dict[str, int | bool]:
    """The constants that choose a compiled kernel; nothing that changes from step to step is among them."""
    return {
        "BLOCK": tiling.block,
        "PADDED": tiling.padded,
        "BLOCKS": tiling.blocks,
        "MAP": MAPS.index(options.map),
        "DECOUPLED": options.decoupled,
        "ALIGNED": is_aligned,
    }


def launch_options(tiling: Tiling) -> dict[str, int | bool]:
    return options_for(tiling.warps)


def options_for(warps: int) -> dict[str, int | bool]:
    """How Triton compiles: no multiplication is fused into an addition, and ptxas may use what registers there are.

    Left to itself ptxas spills 8 bytes of Lion on sm_80, and of an FP8 cast on sm_89, to keep one more program on a
    multiprocessor.
    """
    options: dict[str, int | bool] = {"num_warps": warps, "enable_fp_fusion": False}
    if torch.version.hip is None:
        options["maxnreg"] = min(MOST_REGISTERS, REGISTERS_OF_A_MULTIPROCESSOR // (32 * warps))
    return options


def is_aligned(items: Sequence[FlatItem], tiling: Tiling) -> bool:
    """Whether whole tiles may be read in wide words: blocks without padding, every tensor on its bytes."""
    if tiling.padded != tiling.block or tiling.elements % ALIGNMENT_BYTES:
        return False
    return all(
        tensor.data_ptr() % ALIGNMENT_BYTES == 0
        for item in items
        for tensor in (item.parameter, item.gradient, *(moment.codes for moment in item.moments))
    )


@lru_cache(maxsize=MOST_TILE_TABLES)
def tile_table(sizes: tuple[int, ...], elements_of_a_tile: int, device: torch.device) -> Tensor:
    """i32[tiles of all items]: the number of the item that each tile belongs to."""
    counts = torch.tensor([-(-size // elements_of_a_tile) for size in sizes])
    return torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts).to(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the one that Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=16)
def device_trees(device: torch.device) -> Tensor:
    return trees().to(device)
