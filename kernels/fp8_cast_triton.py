"""FP8 casts as Triton kernels: a matrix x [M,K] to codes and scales, once or in two ways from one reading.

A program works on one tile of x. Where a tile holds whole groups of a grid (stretches and squares of 128, rows that
fit) it finds their scales itself, and x is read once. Where a group spans the tensor, a column, or a row too long for
a tile, ``amax_kernel`` goes over x before it. All is in the orientation of x: codes of the transpose are codes whose
columns are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels.fp8_bits_triton import encode, magnitude_bits, reciprocals, scales_of

# What shares a scale within a tile.
NOTHING = tl.constexpr(0)
A_ROW = tl.constexpr(1)
A_COLUMN = tl.constexpr(2)
THE_TILE = tl.constexpr(3)
# Where the scale comes from: the tile itself, largest magnitudes found before, or the caller.
FROM_TILE = tl.constexpr(0)
FROM_AMAX = tl.constexpr(1)
FROM_CALLER = tl.constexpr(2)


@triton.jit
def tile_place(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """i64 row and column numbers of a program's tile, [ROWS, 1] and [1, COLUMNS], and the tile's own two numbers."""
    tiles_of_a_row = tl.cdiv(num_columns, COLUMNS)
    tile_row = (tl.program_id(0) // tiles_of_a_row).to(tl.int64)
    tile_column = (tl.program_id(0) % tiles_of_a_row).to(tl.int64)
    rows = tile_row * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tile_column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return rows, columns, tile_row, tile_column


@triton.jit
def load_tile(x_ptr, x_row_stride, x_column_stride, rows, columns, mask):
    """f32 tile of x; bf16 by a shift, since Triton's interpreter converts its subnormal numbers wrongly."""
    x = tl.load(x_ptr + rows * x_row_stride + columns * x_column_stride, mask=mask, other=0.0)
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def largest_of_rows(bits):
    return tl.max(bits, axis=1, keep_dims=True)


@triton.jit
def largest_of_columns(bits):
    return tl.max(bits, axis=0, keep_dims=True)


@triton.jit
def amax_kernel(
    x_ptr,
    row_amax_ptr,
    column_amax_ptr,
    tensor_amax_ptr,
    num_rows,
    num_columns,
    x_row_stride,
    x_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OF_ROWS: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    OF_TENSOR: tl.constexpr,
):
    """Raises zeroed i32 amax[M], amax[K] and amax[1] to the bits of the largest magnitudes of x."""
    rows, columns, _, _ = tile_place(num_rows, num_columns, ROWS, COLUMNS)
    mask = (rows < num_rows) & (columns < num_columns)
    bits = magnitude_bits(load_tile(x_ptr, x_row_stride, x_column_stride, rows, columns, mask))
    if OF_ROWS:
        tl.atomic_max(row_amax_ptr + rows, largest_of_rows(bits), mask=rows < num_rows, sem="relaxed")
    if OF_COLUMNS:
        tl.atomic_max(column_amax_ptr + columns, largest_of_columns(bits), mask=columns < num_columns, sem="relaxed")
    if OF_TENSOR:
        tl.atomic_max(tensor_amax_ptr, tl.max(largest_of_rows(bits)), sem="relaxed")


@triton.jit
def tile_scales(
    bits,
    scale_ptr,
    amax_ptr,
    scale_row_stride,
    scale_column_stride,
    rows,
    columns,
    tile_row,
    tile_column,
    num_rows,
    num_columns,
    OVER: tl.constexpr,
    SOURCE: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scales of a tile, [ROWS, 1], [1, COLUMNS] or [1, 1]; written by the programs that come first to them."""
    if SOURCE == FROM_CALLER:
        return tl.load(scale_ptr + tl.zeros([1, 1], tl.int32))
    if OVER == A_ROW:
        if SOURCE == FROM_TILE:
            largest = largest_of_rows(bits)
        else:
            largest = tl.load(amax_ptr + rows, mask=rows < num_rows, other=0)
        scale = scales_of(largest, FORMAT, POWER_OF_TWO)
        place = scale_ptr + rows * scale_row_stride + tile_column * scale_column_stride
        is_first = (SOURCE == FROM_TILE) | (tile_column == 0)
        tl.store(place, scale, mask=(rows < num_rows) & is_first)
    elif OVER == A_COLUMN:
        if SOURCE == FROM_TILE:
            largest = largest_of_columns(bits)
        else:
            largest = tl.load(amax_ptr + columns, mask=columns < num_columns, other=0)
        scale = scales_of(largest, FORMAT, POWER_OF_TWO)
        place = scale_ptr + tile_row * scale_row_stride + columns * scale_column_stride
        is_first = (SOURCE == FROM_TILE) | (tile_row == 0)
        tl.store(place, scale, mask=(columns < num_columns) & is_first)
    else:
        if SOURCE == FROM_TILE:
            largest = largest_of_columns(largest_of_rows(bits))
        else:
            largest = tl.load(amax_ptr + tl.zeros([1, 1], tl.int32))
        scale = scales_of(largest, FORMAT, POWER_OF_TWO)
        place = scale_ptr + tile_row * scale_row_stride + tile_column * scale_column_stride
        is_first = (SOURCE == FROM_TILE) | ((tile_row == 0) & (tile_column == 0))
        tl.store(place + tl.zeros([1, 1], tl.int32), scale, mask=is_first & (tl.zeros([1, 1], tl.int32) == 0))
    return scale


@triton.jit
def cast_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    amax_ptr,
    second_codes_ptr,
    second_scale_ptr,
    second_amax_ptr,
    num_rows,
    num_columns,
    x_row_stride,
    x_column_stride,
    codes_row_stride,
    codes_column_stride,
    scale_row_stride,
    scale_column_stride,
    second_codes_row_stride,
    second_codes_column_stride,
    second_scale_row_stride,
    second_scale_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVER: tl.constexpr,
    SOURCE: tl.constexpr,
    SECOND_OVER: tl.constexpr,
    SECOND_SOURCE: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Codes u8[M,K] and scales of x, and, unless SECOND_OVER is NOTHING, second ones that lie or are scaled otherwise.

    With scales FROM_CALLER, amax i32[1] is raised to the bits of the largest magnitude of x.
    """
    rows, columns, tile_row, tile_column = tile_place(num_rows, num_columns, ROWS, COLUMNS)
    mask = (rows < num_rows) & (columns < num_columns)
    x = load_tile(x_ptr, x_row_stride, x_column_stride, rows, columns, mask)
    bits = magnitude_bits(x)
    scale = tile_scales(
        bits, scale_ptr, amax_ptr, scale_row_stride, scale_column_stride, rows, columns, tile_row, tile_column,
        num_rows, num_columns, OVER, SOURCE, FORMAT, POWER_OF_TWO,
    )  # fmt: skip
    codes = encode(x * reciprocals(scale), FORMAT, HARDWARE)
    tl.store(codes_ptr + rows * codes_row_stride + columns * codes_column_stride, codes, mask=mask)
    if SOURCE == FROM_CALLER:
        tl.atomic_max(amax_ptr, tl.max(largest_of_rows(bits)), sem="relaxed")
    if SECOND_OVER != NOTHING:
        second_scale = tile_scales(
            bits, second_scale_ptr, second_amax_ptr, second_scale_row_stride, second_scale_column_stride, rows, columns,
            tile_row, tile_column, num_rows, num_columns, SECOND_OVER, SECOND_SOURCE, FORMAT, POWER_OF_TWO,
        )  # fmt: skip
        if (OVER != SECOND_OVER) | (SOURCE != SECOND_SOURCE):
            codes = encode(x * reciprocals(second_scale), FORMAT, HARDWARE)
        second_place = second_codes_ptr + rows * second_codes_row_stride + columns * second_codes_column_stride
        tl.store(second_place, codes, mask=mask)
