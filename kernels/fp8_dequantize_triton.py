"""FP8 codes back to floats as a Triton kernel: ``codes * scale`` in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphopt.kernels.block_maps_triton import nearest_bfloat16
from graphopt.kernels.fp8_bits_triton import FORMATS, decode
from graphopt.kernels.fp8_cast_triton import tile_place
from graphopt.kernels.fp8_format import Grid, format_of
from graphopt.kernels.launch_triton import on_device, options_for

# 16 bytes of codes for each thread of 4 warps, twice; a divisor of every size of a group.
ROWS, COLUMNS, WARPS = 32, 128, 4


@triton.jit
def groups_along(elements, tile, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """The numbers of the groups of SIZE along a dim (0: one group) for a tile: one for each element, or one for all."""
    if SIZE == 1:
        groups = elements
    elif SIZE == 0:
        groups = tl.zeros([1, 1], tl.int64)
    else:
        groups = tl.zeros([1, 1], tl.int64) + tile * SIDE // SIZE
    return groups


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scale_ptr,
    values_ptr,
    num_rows,
    num_columns,
    codes_row_stride,
    codes_column_stride,
    scale_row_stride,
    scale_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Values [M,K], contiguous, of codes u8[M,K] and scales whose groups are GROUP_ROWS x GROUP_COLUMNS, 0 for all."""
    rows, columns, tile_row, tile_column = tile_place(num_rows, num_columns, ROWS, COLUMNS)
    mask = (rows < num_rows) & (columns < num_columns)
    codes = tl.load(codes_ptr + rows * codes_row_stride + columns * codes_column_stride, mask=mask, other=0)
    scale_rows = groups_along(rows, tile_row, GROUP_ROWS, ROWS)
    scale_columns = groups_along(columns, tile_column, GROUP_COLUMNS, COLUMNS)
    place = scale_ptr + scale_rows * scale_row_stride + scale_columns * scale_column_stride
    scale = tl.load(place, mask=(scale_rows < num_rows) & (scale_columns < num_columns), other=1.0)
    values = decode(codes, FORMAT) * scale
    dtype = values_ptr.dtype.element_ty
    narrow = nearest_bfloat16(values) if dtype == tl.bfloat16 else values.to(dtype)
    tl.store(values_ptr + rows * num_columns + columns, narrow, mask=mask)


def dequantize(codes: Tensor, scale: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """``codes * scale`` [M,K] in ``dtype``, contiguous; codes may lie in any way."""
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    num_rows, num_columns = codes.shape
    if not codes.numel():
        return values
    with on_device(codes.device):
        dequantize_kernel[(triton.cdiv(num_rows, ROWS) * triton.cdiv(num_columns, COLUMNS),)](
            codes.view(torch.uint8),
            scale,
            values,
            num_rows,
            num_columns,
            *codes.stride(),
            *scale.stride(),
            **dequantize_constants(grid, format_of(codes).name),
            **options_for(WARPS),
        )
    return values


def dequantize_constants(grid: Grid, format: str) -> dict[str, int]:
    return {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "GROUP_ROWS": grid[0],
        "GROUP_COLUMNS": grid[1],
        "FORMAT": FORMATS.index(format),
    }
