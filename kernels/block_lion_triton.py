"""The GPU form of ``block_lion``: one launch for a list of parameters, with the bits of the reference.

See ``block_adam_triton``, which it follows; there is no second moment and no division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import triton
import triton.language as tl
from torch import Tensor

from graphopt.kernels.block_items_triton import (
    NUM_FIELDS,
    field,
    load_floats,
    load_scales,
    load_tile,
    store_floats,
    store_scales,
    store_tile,
    typed,
)
from graphopt.kernels.block_lion import LionScalars
from graphopt.kernels.block_maps_triton import block_scales, decode_signed, encode_signed, is_finite, random_bits
from graphopt.kernels.block_update import BlockOptions, FlatItem
from graphopt.kernels.launch_triton import POINTERS, launch


@triton.jit
def lion_formula(wide, gradient, mean, scalars_ptr, DECOUPLED: tl.constexpr):
    """New parameter and mean, each one rounded operation after another; see ``block_lion``."""
    if DECOUPLED:
        wide = wide * tl.load(scalars_ptr)
    else:
        gradient = gradient + wide * tl.load(scalars_ptr + 1)
    direction = mean * tl.load(scalars_ptr + 2) + gradient * tl.load(scalars_ptr + 3)
    unit = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, 0.0))
    unit = tl.where(direction == direction, unit, direction)
    wide = wide - unit * tl.load(scalars_ptr + 6)
    mean = mean * tl.load(scalars_ptr + 4) + gradient * tl.load(scalars_ptr + 5)
    return wide, mean


@triton.jit
def update_tile(
    row_ptr,
    tile,
    scalars_ptr,
    factor,
    trees_ptr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    DECOUPLED: tl.constexpr,
    STOCHASTIC_WEIGHT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tile number ``tile`` of the parameter in the row: BLOCKS blocks of BLOCK elements, PADDED to a power of two."""
    num_elements = field(row_ptr, 6)
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = tl.arange(0, PADDED)[None, :]
    element = blocks * BLOCK + inside
    mask = (inside < BLOCK) & (element < num_elements)
    num_blocks = (num_elements + BLOCK - 1) // BLOCK
    first_scales_ptr = typed(field(row_ptr, 3), tl.float32, False)

    wide = load_floats(field(row_ptr, 0), element, mask, field(row_ptr, 8), MASKED)
    gradient = load_floats(field(row_ptr, 1), element, mask, field(row_ptr, 9), MASKED) * factor
    codes = load_tile(field(row_ptr, 2), element, mask, tl.int8, MASKED)
    mean = decode_signed(codes, load_scales(first_scales_ptr, blocks, num_blocks), trees_ptr, MAP)
    wide, mean = lion_formula(wide, gradient, mean, scalars_ptr, DECOUPLED)
    if MASKED:
        mean = tl.where(mask, mean, 0.0)

    bits = random_bits(field(row_ptr, 10), field(row_ptr, 11) + element)
    store_floats(field(row_ptr, 0), element, mask, wide, bits, field(row_ptr, 8), STOCHASTIC_WEIGHT, MASKED)
    scales = block_scales(mean)
    store_scales(first_scales_ptr, blocks, num_blocks, scales)
    store_tile(field(row_ptr, 2), element, mask, encode_signed(mean, scales, trees_ptr, MAP), tl.int8, MASKED)


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def block_lion_kernel(
    tile_items_ptr,
    table_ptr,
    scalars_ptr,
    factor_ptr,
    trees_ptr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    DECOUPLED: tl.constexpr,
    STOCHASTIC_WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + tl.load(tile_items_ptr + program).to(tl.int64) * NUM_FIELDS
    tile = program - field(row_ptr, 7)
    factor = tl.load(factor_ptr)
    if is_finite(factor):
        is_whole = (tile + 1) * (BLOCKS * BLOCK) <= field(row_ptr, 6)
        if ALIGNED & is_whole:
            update_tile(
                row_ptr, tile, scalars_ptr, factor, trees_ptr, BLOCK, PADDED, BLOCKS, MAP, DECOUPLED,
                STOCHASTIC_WEIGHT, False,
            )  # fmt: skip
        else:
            update_tile(
                row_ptr, tile, scalars_ptr, factor, trees_ptr, BLOCK, PADDED, BLOCKS, MAP, DECOUPLED,
                STOCHASTIC_WEIGHT, True,
            )  # fmt: skip


def update_(items: Sequence[FlatItem], scalars: LionScalars, options: BlockOptions, factor: Tensor | None) -> None:
    """The update in place of flat ``items`` that lie on one GPU (or, interpreted, in the memory of the host)."""
    choices = {"STOCHASTIC_WEIGHT": options.stochastic_weight}
    launch(block_lion_kernel, items, astuple(scalars), options, factor, choices)
