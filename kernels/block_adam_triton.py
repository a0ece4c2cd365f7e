"""The GPU form of ``block_adam``: one launch for a list of parameters, with the bits of the reference.

Each program reads parameter, gradient, codes and scales of its tile once and writes what changes once. All numbers of a
step come from one device tensor, so that a new learning rate, decay, scale or step compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import triton
import triton.language as tl
from torch import Tensor

from graphopt.kernels.block_adam import AdamScalars
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
from graphopt.kernels.block_maps_triton import (
    block_scales,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    is_finite,
    random_bits,
    uniform,
)
from graphopt.kernels.block_update import BlockOptions, FlatItem
from graphopt.kernels.launch_triton import POINTERS, launch


@triton.jit
def adam_formula(wide, gradient, mean, square, scalars_ptr, DECOUPLED: tl.constexpr):
    """New parameter, mean and square, each one rounded operation after another; see ``block_adam``."""
    if DECOUPLED:
        wide = wide * tl.load(scalars_ptr)
    else:
        gradient = gradient + wide * tl.load(scalars_ptr + 1)
    mean = mean + (gradient - mean) * tl.load(scalars_ptr + 2)
    square = square * tl.load(scalars_ptr + 3) + gradient * tl.load(scalars_ptr + 4) * gradient
    root = tl.div_rn(tl.sqrt_rn(square), tl.load(scalars_ptr + 5) + tl.zeros_like(square))
    wide = wide - tl.div_rn(mean * tl.load(scalars_ptr + 7), root + tl.load(scalars_ptr + 6))
    return wide, mean, square


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
    STOCHASTIC_STATE: tl.constexpr,
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
    second_scales_ptr = typed(field(row_ptr, 5), tl.float32, False)

    wide = load_floats(field(row_ptr, 0), element, mask, field(row_ptr, 8), MASKED)
    gradient = load_floats(field(row_ptr, 1), element, mask, field(row_ptr, 9), MASKED) * factor
    first_codes = load_tile(field(row_ptr, 2), element, mask, tl.int8, MASKED)
    second_codes = load_tile(field(row_ptr, 4), element, mask, tl.uint8, MASKED)
    mean = decode_signed(first_codes, load_scales(first_scales_ptr, blocks, num_blocks), trees_ptr, MAP)
    square = decode_unsigned(second_codes, load_scales(second_scales_ptr, blocks, num_blocks), trees_ptr, MAP)
    wide, mean, square = adam_formula(wide, gradient, mean, square, scalars_ptr, DECOUPLED)
    if MASKED:  # what padding holds is no element of the block: without eps, 0 / 0 would be its largest
        mean = tl.where(mask, mean, 0.0)
        square = tl.where(mask, square, 0.0)

    bits = random_bits(field(row_ptr, 10), field(row_ptr, 11) + element)
    store_floats(field(row_ptr, 0), element, mask, wide, bits, field(row_ptr, 8), STOCHASTIC_WEIGHT, MASKED)
    first_scales = block_scales(mean)
    second_scales = block_scales(square)
    store_scales(first_scales_ptr, blocks, num_blocks, first_scales)
    store_scales(second_scales_ptr, blocks, num_blocks, second_scales)
    first_codes = encode_signed(mean, first_scales, trees_ptr, MAP)
    second_codes = encode_unsigned(square, second_scales, uniform(bits), trees_ptr, MAP, STOCHASTIC_STATE)
    store_tile(field(row_ptr, 2), element, mask, first_codes, tl.int8, MASKED)
    store_tile(field(row_ptr, 4), element, mask, second_codes, tl.uint8, MASKED)


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def block_adam_kernel(
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
    STOCHASTIC_STATE: tl.constexpr,
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
                STOCHASTIC_STATE, STOCHASTIC_WEIGHT, False,
            )  # fmt: skip
        else:
            update_tile(
                row_ptr, tile, scalars_ptr, factor, trees_ptr, BLOCK, PADDED, BLOCKS, MAP, DECOUPLED,
                STOCHASTIC_STATE, STOCHASTIC_WEIGHT, True,
            )  # fmt: skip


def update_(items: Sequence[FlatItem], scalars: AdamScalars, options: BlockOptions, factor: Tensor | None) -> None:
    """The update in place of flat ``items`` that lie on one GPU (or, interpreted, in the memory of the host)."""
    choices = {"STOCHASTIC_STATE": options.stochastic_state, "STOCHASTIC_WEIGHT": options.stochastic_weight}
    launch(block_adam_kernel, items, astuple(scalars), options, factor, choices)
