"""Products of FP8 codes in Triton: scaled once at the end, or every 128 of the contraction (block scales).

Both kernels are persistent: as many programs as run at once walk over the tiles of the result, GROUP rows of tiles at a
time, so that programs that run together share operands in the L2 cache. Products are summed in float32.

Operands are handed over as they lie in memory. ``a`` and ``b`` are matrices with contiguous rows: [M, K] and [N, K]
where ``*_K_LAST`` (the contraction is contiguous), else [K, M] and [K, N]. ``*_TMA``: as tensor descriptors over tiles,
else as pointers to rows that lie ``*_stride`` apart. Offsets of pointers are 64 bits. What lies outside is read as 0
and not written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile of the result: down GROUP rows of tiles, then to the next column."""
    tiles_of_group = GROUP * tiles_n
    first_row = tile // tiles_of_group * GROUP
    num_rows = tl.minimum(tiles_m - first_row, GROUP)
    place = tile % tiles_of_group
    return first_row + place % num_rows, place // num_rows


@triton.jit
def load_rows(matrix, stride, row, column, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA):
    """[ROWS, COLUMNS] of ``matrix`` from (row, column); 0 outside."""
    if TMA:
        values = matrix.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        pointers = matrix + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        values = tl.load(pointers, mask=mask, other=0.0)
    return values


@triton.jit
def load_tile(matrix, stride, start, k, size, K, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, K_LAST, TMA):
    """[SIZE, BLOCK_K] of an operand from (start, k), however it lies; 0 outside."""
    if K_LAST:
        tile = load_rows(matrix, stride, start, k, size, K, SIZE, BLOCK_K, TMA)
    else:
        tile = load_rows(matrix, stride, k, start, K, size, BLOCK_K, SIZE, TMA).T
    return tile


@triton.jit
def load_scales(scale_ptr, stride, offset, start, size, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of SIZE rows of an operand from ``start`` on, at ``offset`` along the contraction.

    f32 scalar where one scale serves them all (BLOCK 0, or a block of rows that holds the tile), else f32[SIZE].
    """
    if BLOCK == 0:
        scales = tl.load(scale_ptr + offset)
    elif BLOCK % SIZE == 0:
        scales = tl.load(scale_ptr + offset + (start // BLOCK).to(tl.int64) * stride)
    else:
        rows = start + tl.arange(0, SIZE)
        scales = tl.load(scale_ptr + offset + (rows // BLOCK).to(tl.int64) * stride, mask=rows < size, other=1.0)
    return scales


@triton.jit
def scale_products(a_scale, b_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """f32[BLOCK_M, BLOCK_N], or [BLOCK_M, 1] where ``b`` has one scale: a_scale x b_scale."""
    rows = a_scale + tl.zeros([BLOCK_M], tl.float32)  # a scalar becomes a column
    if b_scale.numel == 1:
        products = (rows * b_scale)[:, None]
    else:
        products = rows[:, None] * b_scale[None, :]
    return products


@triton.jit
def store_tile(c, c_stride, bias_ptr, values, row, column, M, N, HAS_BIAS, TMA):
    """Adds the bias to a f32 tile, rounds it once and writes it at (row, column)."""
    columns = column + tl.arange(0, values.shape[1])
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        values += bias.to(tl.float32)[None, :]
    if TMA:
        c.store([row, column], values.to(c.dtype))
    else:
        rows = row + tl.arange(0, values.shape[0])
        pointers = c + rows.to(tl.int64)[:, None] * c_stride + columns[None, :]
        tl.store(pointers, values.to(c.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


# M is the number of tokens, which changes from batch to batch; nothing that is compiled depends on it.
@triton.jit(do_not_specialize=["M"])
def fp8_matmul_kernel(
    a,
    a_stride,
    a_scale_ptr,
    a_scale_stride,
    b,
    b_stride,
    b_scale_ptr,
    b_scale_stride,
    bias_ptr,
    c,
    c_stride,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr,
    A_ROWS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    A_K_LAST: tl.constexpr,
    B_K_LAST: tl.constexpr,
    LOAD_TMA: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """c[M, N] = (a x b) * scales + bias, with scales that do not change along the contraction.

    A_ROWS, B_COLUMNS: how many rows of ``a`` and columns of ``b`` share a scale; 0: all. PROMOTE_EVERY: on Hopper,
    whose matrix unit keeps fewer bits than float32, after how many of the contraction its sums are added in float32;
    None: never.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            a_tile = load_tile(a, a_stride, row, k, M, K, BLOCK_M, BLOCK_K, A_K_LAST, LOAD_TMA)
            b_tile = load_tile(b, b_stride, column, k, N, K, BLOCK_N, BLOCK_K, B_K_LAST, LOAD_TMA)
            sums = tl.dot(a_tile, b_tile.T, sums, max_num_imprecise_acc=PROMOTE_EVERY)
        a_scale = load_scales(a_scale_ptr, a_scale_stride, 0, row, M, BLOCK_M, A_ROWS)
        b_scale = load_scales(b_scale_ptr, b_scale_stride, 0, column, N, BLOCK_N, B_COLUMNS)
        values = sums * scale_products(a_scale, b_scale, BLOCK_M, BLOCK_N)
        store_tile(c, c_stride, bias_ptr, values, row, column, M, N, HAS_BIAS, STORE_TMA)


@triton.jit(do_not_specialize=["M"])
def fp8_block_matmul_kernel(
    a,
    a_stride,
    a_scale_ptr,
    a_scale_stride,
    a_scale_stride_k,
    b,
    b_stride,
    b_scale_ptr,
    b_scale_stride,
    b_scale_stride_k,
    bias_ptr,
    c,
    c_stride,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    A_ROWS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    A_K_LAST: tl.constexpr,
    B_K_LAST: tl.constexpr,
    LOAD_TMA: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """c[M, N] = sum over blocks of BLOCK_K of (a x b) * scales, + bias: every block is scaled in float32, then added.

    A_ROWS, B_COLUMNS: how many rows of ``a`` and columns of ``b`` share a scale within a block; 0: all. An operand
    whose scales do not change along the contraction has a stride of 0 there.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            a_scale = load_scales(a_scale_ptr, a_scale_stride, step * a_scale_stride_k, row, M, BLOCK_M, A_ROWS)
            b_scale = load_scales(b_scale_ptr, b_scale_stride, step * b_scale_stride_k, column, N, BLOCK_N, B_COLUMNS)
            a_tile = load_tile(a, a_stride, row, k, M, K, BLOCK_M, BLOCK_K, A_K_LAST, LOAD_TMA)
            b_tile = load_tile(b, b_stride, column, k, N, K, BLOCK_N, BLOCK_K, B_K_LAST, LOAD_TMA)
            sums += tl.dot(a_tile, b_tile.T) * scale_products(a_scale, b_scale, BLOCK_M, BLOCK_N)
        store_tile(c, c_stride, bias_ptr, sums, row, column, M, N, HAS_BIAS, STORE_TMA)
