"""The GPU forms of ``block_quantize``: float32 to codes and scales, and back, with the bits of the references."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphopt.kernels.block_items_triton import load_scales, store_scales
from graphopt.kernels.block_maps import MAPS
from graphopt.kernels.block_maps_triton import (
    block_scales,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    random_bits,
    uniform,
)
from graphopt.kernels.block_update import Moment
from graphopt.kernels.counter_random import Key, key_of
from graphopt.kernels.launch_triton import Tiling, device_trees, launch_options, on_device


@triton.jit
def quantize_tile(
    values_ptr,
    codes_ptr,
    scales_ptr,
    trees_ptr,
    num_elements,
    key,
    offset,
    tile,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    IS_SIGNED: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    MASKED: tl.constexpr,
):
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = tl.arange(0, PADDED)[None, :]
    element = blocks * BLOCK + inside
    mask = (inside < BLOCK) & (element < num_elements)
    if MASKED:
        values = tl.load(values_ptr + element, mask=mask, other=0.0)
    else:
        values = tl.load(values_ptr + element)
    scales = block_scales(values)
    store_scales(scales_ptr, blocks, (num_elements + BLOCK - 1) // BLOCK, scales)
    if IS_SIGNED:
        codes = encode_signed(values, scales, trees_ptr, MAP)
    else:
        draw = uniform(random_bits(key, offset + element))
        codes = encode_unsigned(values, scales, draw, trees_ptr, MAP, IS_DRAWN)
    if MASKED:
        tl.store(codes_ptr + element, codes, mask=mask)
    else:
        tl.store(codes_ptr + element, codes)


@triton.jit(do_not_specialize=["num_elements", "key", "offset"])
def quantize_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    trees_ptr,
    num_elements,
    key,
    offset,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    IS_SIGNED: tl.constexpr,
    IS_DRAWN: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    if (BLOCK == PADDED) & ((tile + 1) * (BLOCKS * BLOCK) <= num_elements):
        quantize_tile(
            values_ptr, codes_ptr, scales_ptr, trees_ptr, num_elements, key, offset, tile, BLOCK, PADDED, BLOCKS,
            MAP, IS_SIGNED, IS_DRAWN, False,
        )  # fmt: skip
    else:
        quantize_tile(
            values_ptr, codes_ptr, scales_ptr, trees_ptr, num_elements, key, offset, tile, BLOCK, PADDED, BLOCKS,
            MAP, IS_SIGNED, IS_DRAWN, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_elements"])
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    values_ptr,
    trees_ptr,
    num_elements,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    IS_SIGNED: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = tl.arange(0, PADDED)[None, :]
    element = blocks * BLOCK + inside
    mask = (inside < BLOCK) & (element < num_elements)
    codes = tl.load(codes_ptr + element, mask=mask, other=0)
    scales = load_scales(scales_ptr, blocks, (num_elements + BLOCK - 1) // BLOCK)
    if IS_SIGNED:
        values = decode_signed(codes, scales, trees_ptr, MAP)
    else:
        values = decode_unsigned(codes, scales, trees_ptr, MAP)
    tl.store(values_ptr + element, values, mask=mask)


def quantize(values: Tensor, into: Moment, block: int, name: str, draw: tuple[Key, int] | None) -> None:
    """Fills flat ``into`` from flat f32 ``values``; ``draw``: key and offset of a stochastic rounding of u8 codes."""
    tiling, is_signed = Tiling.of(block), into.codes.is_signed()
    key, offset = draw if draw is not None else (key_of(0, 0), 0)
    if values.numel() == 0:
        return
    with on_device(values.device):
        quantize_kernel[(triton.cdiv(values.numel(), tiling.elements),)](
            values,
            into.codes,
            into.scales,
            device_trees(values.device),
            values.numel(),
            key.packed,
            offset,
            **_constants(tiling, name, is_signed),
            IS_DRAWN=draw is not None and not is_signed,
            **launch_options(tiling),
        )


def dequantize(moment: Moment, values: Tensor, block: int, name: str) -> None:
    """Fills flat f32 ``values`` from a flat ``moment``."""
    tiling = Tiling.of(block)
    if values.numel() == 0:
        return
    with on_device(values.device):
        dequantize_kernel[(triton.cdiv(values.numel(), tiling.elements),)](
            moment.codes,
            moment.scales,
            values,
            device_trees(values.device),
            values.numel(),
            **_constants(tiling, name, moment.codes.is_signed()),
            **launch_options(tiling),
        )


def _constants(tiling: Tiling, name: str, is_signed: bool) -> dict[str, int | bool]:
    return {
        "BLOCK": tiling.block,
        "PADDED": tiling.padded,
        "BLOCKS": tiling.blocks,
        "MAP": MAPS.index(name),
        "IS_SIGNED": is_signed,
    }
