"""Maps, random bits and narrow floats as Triton functions: the bits of ``block_maps`` and ``counter_random``.

Tiles are [blocks, elements of a block]. Divisions and roots are the correctly rounded ones, and kernels are compiled
without fusing multiplications into additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels import block_maps, counter_random

COMPANDED = tl.constexpr(block_maps.MAPS.index(block_maps.COMPANDED))
LINEAR = tl.constexpr(block_maps.MAPS.index(block_maps.LINEAR))
DYNAMIC = tl.constexpr(block_maps.MAPS.index(block_maps.DYNAMIC))
SIGNED_CODES = tl.constexpr(block_maps.SIGNED_CODES)
UNSIGNED_CODES = tl.constexpr(block_maps.UNSIGNED_CODES)
PER_SIGNED_CODE = tl.constexpr(block_maps.PER_SIGNED_CODE)
PER_SIGNED_SQUARE = tl.constexpr(block_maps.PER_SIGNED_SQUARE)
PER_UNSIGNED_CODE = tl.constexpr(block_maps.PER_UNSIGNED_CODE)
PER_UNSIGNED_SQUARE = tl.constexpr(block_maps.PER_UNSIGNED_SQUARE)

# Where each table lies in the packed trees (cpu_calls.trees).
SIGNED_VALUES = tl.constexpr(0)
SIGNED_EDGES = tl.constexpr(256)
UNSIGNED_VALUES = tl.constexpr(511)
UNSIGNED_EDGES = tl.constexpr(767)
STEPS = tl.constexpr(1022)

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
NOT_A_NUMBER = tl.constexpr(0x7FC00000)
# Added and taken away, 1.5 * 2^23 leaves a float32 below 2^22 rounded to a whole number, ties to even.
TO_WHOLE = tl.constexpr(12582912.0)

STRIDE = tl.constexpr(counter_random.STRIDE)
MIX_FIRST = tl.constexpr(counter_random.MIX_FIRST)
MIX_SECOND = tl.constexpr(counter_random.MIX_SECOND)


@triton.jit
def whole(x):
    return (x + TO_WHOLE) - TO_WHOLE


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE


@triton.jit
def block_scales(x):
    """f32[blocks, 1] of a tile: largest magnitudes; NaN where a block is not finite."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1, keep_dims=True)
    return tl.where(bits < INFINITE, bits, NOT_A_NUMBER).to(tl.float32, bitcast=True)


@triton.jit
def decode_signed(codes, scales, trees_ptr, MAP: tl.constexpr):
    if MAP == DYNAMIC:
        return tl.load(trees_ptr + SIGNED_VALUES + codes.to(tl.int32) + 128) * scales
    wide = codes.to(tl.float32)
    if MAP == LINEAR:
        return wide * PER_SIGNED_CODE * scales
    return wide * tl.abs(wide) * PER_SIGNED_SQUARE * scales


@triton.jit
def decode_unsigned(codes, scales, trees_ptr, MAP: tl.constexpr):
    if MAP == DYNAMIC:
        return tl.load(trees_ptr + UNSIGNED_VALUES + codes.to(tl.int32)) * scales
    wide = codes.to(tl.float32)
    if MAP == LINEAR:
        return wide * PER_UNSIGNED_CODE * scales
    root = wide * wide * PER_UNSIGNED_SQUARE
    return root * root * scales


@triton.jit
def count_below(edges_ptr, x, INCLUSIVE: tl.constexpr):
    """How many of 255 ascending edges lie below x (INCLUSIVE: not above it)."""
    below = tl.zeros_like(x).to(tl.int32)
    for power in tl.static_range(8):
        width = 128 >> power
        edge = tl.load(edges_ptr + below + (width - 1))
        if INCLUSIVE:
            below += tl.where(edge <= x, width, 0)
        else:
            below += tl.where(edge < x, width, 0)
    return below


@triton.jit
def ratio_of(x, scales):
    return tl.div_rn(x, tl.where(scales > 0.0, scales, 1.0) + tl.zeros_like(x))


@triton.jit
def ratio_of_roots(x, scales):
    """sqrt(x / scale) with one division a block; see ``block_maps``."""
    per_root = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), tl.sqrt_rn(tl.where(scales > 0.0, scales, 1.0)))
    return tl.sqrt_rn(x) * per_root


@triton.jit
def encode_signed(x, scales, trees_ptr, MAP: tl.constexpr):
    """i8 codes of a tile rounded to nearest; 0 in blocks whose scale is 0 or NaN."""
    is_live = scales > 0.0
    if MAP == DYNAMIC:
        codes = count_below(trees_ptr + SIGNED_EDGES, ratio_of(x, scales), False) - 128
    elif MAP == LINEAR:
        codes = whole(ratio_of(x, scales) * SIGNED_CODES).to(tl.int32)
    else:
        magnitude = whole(ratio_of_roots(tl.abs(x), scales) * SIGNED_CODES).to(tl.int32)
        codes = tl.where(x < 0.0, -magnitude, magnitude)
    return tl.where(is_live, codes, 0).to(tl.int8)


@triton.jit
def encode_unsigned(x, scales, draw, trees_ptr, MAP: tl.constexpr, IS_DRAWN: tl.constexpr):
    """u8 codes of a tile, rounded to nearest or by ``draw`` f32 in [0, 1); 0 in blocks whose scale is 0 or NaN."""
    is_live = scales > 0.0
    if MAP == DYNAMIC:
        ratio = ratio_of(x, scales)
        if IS_DRAWN:
            below = count_below(trees_ptr + UNSIGNED_VALUES + 1, ratio, True)
            step = tl.load(trees_ptr + STEPS + below)
            way = tl.div_rn(ratio - tl.load(trees_ptr + UNSIGNED_VALUES + below), step)
            codes = below + (way + draw).to(tl.int32)
        else:
            codes = count_below(trees_ptr + UNSIGNED_EDGES, ratio, False)
    else:
        if MAP == LINEAR:
            place = ratio_of(x, scales) * UNSIGNED_CODES
        else:
            place = tl.sqrt_rn(ratio_of_roots(x, scales)) * UNSIGNED_CODES
        if IS_DRAWN:
            codes = (place + draw).to(tl.int32)  # down, as nothing here is below 0
        else:
            codes = whole(place).to(tl.int32)
    codes = tl.minimum(codes, 255)
    if MAP == COMPANDED:
        codes = tl.where(x > 0.0, tl.maximum(codes, 1), codes)
    return tl.where(is_live, codes, 0).to(tl.uint8)


@triton.jit
def mix(bits):
    bits = (bits ^ (bits >> 16)) * MIX_FIRST
    bits = (bits ^ (bits >> 15)) * MIX_SECOND
    return bits ^ (bits >> 15)


@triton.jit
def random_bits(key, index):
    """u32: the random bits of each i64 ``index``; ``key`` is packed into one i64."""
    key_low = (key & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mix(mix((low ^ key_low) + high * STRIDE) ^ key_high)


@triton.jit
def uniform(bits):
    return (bits >> 16).to(tl.int32).to(tl.float32) * 0.0000152587890625


@triton.jit
def stochastic_bfloat16(x, bits):
    words = x.to(tl.uint32, bitcast=True)
    magnitude = words & MAGNITUDE
    drawn = tl.where(magnitude < INFINITE, words + (bits & 0xFFFF), words) >> 16
    drawn = tl.where(magnitude > INFINITE, 0x7FC0, drawn)
    return drawn.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest_bfloat16(x):
    """bf16 by integers, not by a conversion: Triton's interpreter, which the tests run, truncates in that."""
    words = x.to(tl.uint32, bitcast=True)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    rounded = tl.where((words & MAGNITUDE) > INFINITE, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
