"""The scale of a tensor where none is known yet: looks at the tensor only then, without asking the host.

Formula: ``known`` if it is not 0, else ``fp8_format.scale_of`` of ``room`` times the largest magnitude of x [M,K].
Reference: ``graphopt.operators.fp8_history.first_scale`` on a CPU. Where the scale is known, each program reads one
number and ends: 4 bytes for a tile instead of the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphopt.kernels.fp8_bits_triton import FORMATS, INFINITE, magnitude_bits, scales_of
from graphopt.kernels.fp8_cast_triton import largest_of_rows, load_tile, tile_place
from graphopt.kernels.launch_triton import on_device, options_for

SIDE = 128
WARPS = 8
LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def amax_unless_known_kernel(
    x_ptr,
    known_ptr,
    amax_ptr,
    num_rows,
    num_columns,
    x_row_stride,
    x_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Raises a zeroed i32 amax[1] to the bits of the largest magnitude of x, if ``known`` f32[1] is 0."""
    if tl.load(known_ptr) == 0.0:
        rows, columns, _, _ = tile_place(num_rows, num_columns, ROWS, COLUMNS)
        mask = (rows < num_rows) & (columns < num_columns)
        bits = magnitude_bits(load_tile(x_ptr, x_row_stride, x_column_stride, rows, columns, mask))
        tl.atomic_max(amax_ptr, tl.max(largest_of_rows(bits)), sem="relaxed")


@triton.jit
def scale_unless_known_kernel(known_ptr, amax_ptr, scale_ptr, room, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """scale f32[1]: ``known``, or of ``room`` times the magnitude with the bits ``amax`` i32[1]; NaN if not finite."""
    place = tl.zeros([1, 1], tl.int32)
    known, bits = tl.load(known_ptr + place), tl.load(amax_ptr + place)
    roomy = bits.to(tl.float32, bitcast=True) * room
    roomy = tl.where(roomy > LARGEST_FLOAT, LARGEST_FLOAT, roomy)
    bits = tl.where(bits < INFINITE, roomy.to(tl.int32, bitcast=True), bits)
    scale = scales_of(bits, FORMAT, POWER_OF_TWO)
    tl.store(scale_ptr + place, tl.where(known == 0.0, scale, known))


def first_scale(x: Tensor, known: Tensor, format: str, *, margin: int, power_of_two: bool) -> Tensor:
    """f32[1,1]: ``known`` f32[1,1], or the scale of x [M,K] where that is 0."""
    if x.stride(0) == 1 and x.stride(1) != 1:
        x = x.t()  # rows that are contiguous; the largest magnitude is the same
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    num_programs = triton.cdiv(x.shape[0], SIDE) * triton.cdiv(x.shape[1], SIDE)
    with on_device(x.device):
        if num_programs:
            amax_unless_known_kernel[(num_programs,)](
                x, known, amax, *x.shape, *x.stride(), ROWS=SIDE, COLUMNS=SIDE, **options_for(WARPS)
            )
        scale_unless_known_kernel[(1,)](
            known,
            amax,
            scale,
            2.0**margin,
            FORMAT=FORMATS.index(format),
            POWER_OF_TWO=power_of_two,
            **options_for(1),
        )
    return scale
