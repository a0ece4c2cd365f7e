"""FP8 products where there is no FP8 matrix unit: emulated, by float32 products of widened codes.

The numbers are those of the formula in ``fp8_product``: a product of two codes has at most 8 significant bits and is
exact in float32, sums, scales and bias are float32, and there is one rounding. Results on a GPU differ by the order of
the sums alone.

Memory beside the result: codes are widened in pieces of PIECE_ELEMENTS, and the result is made in tiles, so that no
whole operand ever exists in float32 unless it is small. Each element of the result is one sum over the whole
contraction (over each block of 128 with block scales) wherever its tile begins: tiles change its bits no more than the
order in which the BLAS library sums, which may depend on the sizes of what it is given. The same product gives the same
bits each time.

Measured on a CPU without FP8 instructions, 512 x 1024 x 1024, one thread: 16 ms (``torch._scaled_mm`` 20 ms; torch's
bfloat16 product takes 2.4 ms, but rounds to bfloat16 before the scales).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graphopt.kernels.fp8_product import SCALE_BLOCK, Product

# Elements of an operand that are widened at a time: 8 MiB of float32, a second-level cache or two.
PIECE_ELEMENTS = 1 << 21
# Rows and columns of a tile of the result: fewer, and a product of two pieces is all overhead; more, and the tile in
# float32 (4 MiB) is as large as what the pieces save.
LEAST_TILE, MOST_TILE = 64, 1024
# Tiles of a result with block scales are added to once a block, and so should stay in a cache: 1 MiB.
MOST_BLOCK_SCALED_TILE = 512
# Rows of a tile whose products of scales exist at a time: of a whole tile they would be another tile.
SCALED_ROWS = 64


def emulate(product: Product) -> Tensor:
    """The result [M,N], contiguous."""
    result = torch.empty(product.m, product.n, dtype=product.dtype, device=product.device)
    one_tile = _sum_of_blocks if product.has_block_scales else _scaled_sum
    for columns in _tiles(product.n, product.k, product.has_block_scales):
        b_wide = product.b.codes[:, columns].float()
        for rows in _tiles(product.m, product.k, product.has_block_scales):
            tile = one_tile(product, rows, columns, product.a.codes[rows].float(), b_wide)
            if product.bias is not None:
                tile += product.bias[columns].float()
            result[rows, columns] = tile
    return result


def _scaled_sum(product: Product, rows: slice, columns: slice, a_wide: Tensor, b_wide: Tensor) -> Tensor:
    """f32 tile whose scales do not change along the contraction."""
    a_scale = _across(product.a.scale[:, 0], product.a.grid[0], rows)
    b_scale = _across(product.b.scale[0], product.b.grid[1], columns)
    return _scale_(a_wide @ b_wide, a_scale, b_scale)


def _sum_of_blocks(product: Product, rows: slice, columns: slice, a_wide: Tensor, b_wide: Tensor) -> Tensor:
    """f32 tile: every 128 of the contraction scaled, then added."""
    sums = a_wide.new_zeros(a_wide.shape[0], b_wide.shape[1])
    part = torch.empty_like(sums)
    for block, start in enumerate(range(0, product.k, SCALE_BLOCK)):
        along = slice(start, start + SCALE_BLOCK)
        a_scale = _across(product.a.scale[:, block if product.a.grid[1] else 0], product.a.grid[0], rows)
        b_scale = _across(product.b.scale[block if product.b.grid[0] else 0], product.b.grid[1], columns)
        torch.mm(a_wide[:, along], b_wide[along], out=part)
        sums += _scale_(part, a_scale, b_scale)
    return sums


def _scale_(tile: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """``tile``, in place times the products of its rows' and its columns' scales: some rows of them at a time."""
    row_scales = a_scale.expand(tile.shape[0])
    for rows, scales in zip(tile.split(SCALED_ROWS), row_scales.split(SCALED_ROWS), strict=True):
        rows.mul_(scales[:, None] * b_scale)
    return tile


def _across(scale: Tensor, size: int, chosen: slice) -> Tensor:
    """The scales, one for each row (or column) of ``chosen``; one alone where one serves all. ``size``: see Grid."""
    if size == 0:
        return scale
    if size == 1:
        return scale[chosen]
    places = torch.arange(chosen.start, chosen.stop, device=scale.device)
    return scale[places // size]


def _tiles(extent: int, k: int, has_block_scales: bool) -> Iterator[slice]:
    most = MOST_BLOCK_SCALED_TILE if has_block_scales else MOST_TILE
    size = min(most, max(LEAST_TILE, PIECE_ELEMENTS // max(1, k)))
    return (slice(start, min(extent, start + size)) for start in range(0, extent, size))
