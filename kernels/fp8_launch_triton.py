"""Launches of the FP8 cast kernels: which tiles, whether x is read once or twice, and what is compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from graphopt.kernels.fp8_bits_triton import FORMATS
from graphopt.kernels.fp8_cast_triton import (
    A_COLUMN,
    A_ROW,
    FROM_AMAX,
    FROM_CALLER,
    FROM_TILE,
    NOTHING,
    THE_TILE,
    amax_kernel,
    cast_kernel,
)
from graphopt.kernels.fp8_format import Cast, Grid, format_of
from graphopt.kernels.fp8_support import FIRST_CAPABILITY, Capability, support_on
from graphopt.kernels.launch_triton import on_device, options_for

# The sides of a tile: a group of 128, and lines of 128 bytes of codes, whether rows or columns are contiguous.
SIDE = 128
# Rows of a tile where neither a group nor columns that are written ask for more: small tiles, many programs.
FEW_ROWS = 32
# A row up to this long is one tile and is read once: 32 float32 registers for each of 512 threads.
LONGEST_ROW_IN_A_TILE = 16384
ELEMENTS_OF_A_ROW_TILE = 4096
# What a thread has under way at once: 4 words of 16 bytes in bfloat16, 2 of codes.
ELEMENTS_OF_A_THREAD = 32
FEWEST_WARPS = 4
FIRST_TRITON_WITH_ONE_ROUNDING = (3, 9)


@dataclass(frozen=True)
class Tile:
    """The part of x [M,K] that a program works on, ``rows`` x ``columns``, both powers of two."""

    rows: int
    columns: int

    @property
    def warps(self) -> int:
        return max(FEWEST_WARPS, self.rows * self.columns // (32 * ELEMENTS_OF_A_THREAD))

    def num_programs(self, shape: torch.Size) -> int:
        return triton.cdiv(shape[0], self.rows) * triton.cdiv(shape[1], self.columns)

    @classmethod
    def of(cls, casts: Sequence[Cast]) -> Tile:
        """The tile for casts of one x, whose rows are contiguous if that has a choice."""
        first, num_columns = casts[0].codes, casts[0].codes.shape[1]
        is_by_rows = len(casts) == 1 and casts[0].grid == (1, 0) and first.stride(1) == 1
        if is_by_rows and num_columns <= LONGEST_ROW_IN_A_TILE:
            columns = max(16, triton.next_power_of_2(num_columns))
            return cls(max(1, ELEMENTS_OF_A_ROW_TILE // columns), columns)
        needs_side = any(cast.grid[0] == SIDE or cast.codes.stride(1) != 1 for cast in casts)
        return cls(SIDE if needs_side else FEW_ROWS, SIDE)


@dataclass(frozen=True)
class Scaling:
    """What shares a scale within a tile, and where the scale comes from: constants of the kernels."""

    over: int
    source: int

    @classmethod
    def of(cls, grid: Grid, shape: torch.Size, tile: Tile) -> Scaling:
        over = A_ROW if grid[0] == 1 else A_COLUMN if grid[1] == 1 else THE_TILE
        sides = zip(grid, (tile.rows, tile.columns), shape, strict=True)
        is_within = all(size in (1, side) or (size == 0 and extent <= side) for size, side, extent in sides)
        return cls(over.value, (FROM_TILE if is_within else FROM_AMAX).value)


GIVEN = Scaling(THE_TILE.value, FROM_CALLER.value)
NO_SCALING = Scaling(NOTHING.value, FROM_TILE.value)


def fill(x: Tensor, casts: Sequence[Cast], *, power_of_two: bool) -> None:
    """Fills one or two ``casts`` of x [M,K], not empty; each in the orientation of x."""
    tile = Tile.of(casts)
    scalings = [Scaling.of(cast.grid, x.shape, tile) for cast in casts]
    amax = _amax_of(x, sorted({found.over for found in scalings if found.source == FROM_AMAX.value}))
    _launch(x, casts, tile, scalings, amax, power_of_two=power_of_two)


def fill_at_given_scale(x: Tensor, casts: Sequence[Cast]) -> Tensor:
    """The largest magnitude of x [M,K], not empty, f32[1]; fills the codes of ``casts``, one or two, at their scale."""
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    _launch(x, casts, Tile.of(casts), [GIVEN] * len(casts), {GIVEN.over: amax}, power_of_two=False)
    return amax.view(torch.float32)


def _amax_of(x: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
    """By what shares them (A_ROW, ...): the bits of the largest magnitudes of x, i32[M], [K] or [1]."""
    sizes = {A_ROW.value: x.shape[0], A_COLUMN.value: x.shape[1], THE_TILE.value: 1}
    amax = {over: torch.zeros(sizes[over], dtype=torch.int32, device=x.device) for over in wanted}
    if not amax:
        return amax
    tile = Tile(SIDE, SIDE)
    with on_device(x.device):
        amax_kernel[(tile.num_programs(x.shape),)](
            x,
            *(amax.get(over, x) for over in sizes),
            *x.shape,
            *x.stride(),
            **amax_constants(tile, wanted),
            **options_for(tile.warps),
        )
    return amax


def _launch(
    x: Tensor,
    casts: Sequence[Cast],
    tile: Tile,
    scalings: Sequence[Scaling],
    amax: dict[int, Tensor],
    *,
    power_of_two: bool,
) -> None:
    pointers: list[Tensor] = []
    strides: list[int] = []
    for cast, scaling in zip(casts, scalings, strict=True):
        pointers += [cast.codes.view(torch.uint8), cast.scale, amax.get(scaling.over, x)]
        strides += [*cast.codes.stride(), *cast.scale.stride()]
    if len(casts) == 1:
        pointers += [x, x, x]
        strides += [0, 0, 0, 0]
    converts = has_conversion(x.device)
    with on_device(x.device):
        cast_kernel[(tile.num_programs(x.shape),)](
            x,
            *pointers,
            *x.shape,
            *x.stride(),
            *strides,
            **cast_constants(tile, scalings),
            FORMAT=FORMATS.index(format_of(casts[0].codes).name),
            POWER_OF_TWO=power_of_two,
            HARDWARE=converts,
            **cast_options(tile, converts=converts),
        )


def amax_constants(tile: Tile, wanted: Sequence[int]) -> dict[str, int | bool]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "OF_ROWS": A_ROW.value in wanted,
        "OF_COLUMNS": A_COLUMN.value in wanted,
        "OF_TENSOR": THE_TILE.value in wanted,
    }


def cast_constants(tile: Tile, scalings: Sequence[Scaling]) -> dict[str, int]:
    first, second = (*scalings, NO_SCALING)[:2]
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "OVER": first.over,
        "SOURCE": first.source,
        "SECOND_OVER": second.over,
        "SECOND_SOURCE": second.source,
    }


def cast_options(tile: Tile, *, converts: bool) -> dict[str, int | bool]:
    """How a cast is compiled. The integers that stand in for a conversion take the registers that ptxas gives them:
    told how many there are it spills 16 bytes of them (sm_80), and told nothing 8 bytes of what converts (sm_89)."""
    return options_for(tile.warps) if converts else {"num_warps": tile.warps, "enable_fp_fusion": False}


def has_conversion(device: torch.device) -> bool:
    """Whether ``device`` converts float32 to FP8 by an instruction; elsewhere integers do the same."""
    support = support_on(device)
    return support.has_fp8 and not support.is_emulated and rounds_once(torch.cuda.get_device_capability(device))


def rounds_once(capability: Capability) -> bool:
    """Whether Triton converts float32 to FP8 on ``capability`` by one instruction.

    Before 3.9 it truncates to float16 first on sm_89 (seen with 3.6 and 3.8), and what is left may lie on the other
    side of where a code begins.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return capability >= (FIRST_CAPABILITY if version >= FIRST_TRITON_WITH_ONE_ROUNDING else (9, 0))
