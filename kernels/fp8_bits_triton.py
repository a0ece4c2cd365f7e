"""FP8 codes, their values and the rule of a scale as Triton functions: the bits of ``fp8_format``.

Largest magnitudes are found as integers: the bits of floats without their sign are in the order of their values, Inf
above all numbers and NaN above Inf. So a maximum is the same in whatever order it is taken, a NaN is not lost in it,
and no instruction is made that propagates NaN through a float minimum or maximum; beside these, Triton has written
wrong bytes of transposed FP8 tiles (triton-lang/triton#11111).

Codes are bytes (u8). ``HARDWARE`` converts by the instruction that sm_89 and newer have, which rounds to nearest even
and saturates; else integers do the same, which runs everywhere, in Triton's interpreter too (whose own conversion
rounds ties away from even).
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels import fp8_format

E4M3 = tl.constexpr(0)
E5M2 = tl.constexpr(1)
FORMATS = ("e4m3", "e5m2")

LARGEST_E4M3 = tl.constexpr(fp8_format.FORMATS["e4m3"].largest)
LARGEST_E5M2 = tl.constexpr(fp8_format.FORMATS["e5m2"].largest)
SMALLEST_SCALE = tl.constexpr(fp8_format.SMALLEST_SCALE)

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
NOT_A_NUMBER = tl.constexpr(0x7FC00000)
MANTISSA = tl.constexpr(0x7FFFFF)
NAN_CODE = tl.constexpr(0x7F)


@triton.jit
def magnitude_bits(x):
    """i32: the bits of the absolute values of an f32 tile, in the order of the values; all NaN are one."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.where(bits > INFINITE, NOT_A_NUMBER, bits)


@triton.jit
def scales_of(bits, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """f32: the scales of groups with largest magnitudes ``bits`` (``fp8_format.scale_of``)."""
    largest = LARGEST_E4M3 if FORMAT == E4M3 else LARGEST_E5M2
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, largest, tl.float32))
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    if POWER_OF_TWO:
        up = (scale.to(tl.int32, bitcast=True) + MANTISSA) & INFINITE
        scale = up.to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where(bits < INFINITE, scale, float("nan"))


@triton.jit
def reciprocals(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def encode(x, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """u8 codes of an f32 tile: to nearest even, beyond the range the largest, NaN as 0x7F."""
    if HARDWARE:
        narrow = x.to(tl.float8e4nv) if FORMAT == E4M3 else x.to(tl.float8e5)
        codes = narrow.to(tl.uint8, bitcast=True)
    elif FORMAT == E4M3:
        codes = encode_in_integers(x, 3, 7, LARGEST_E4M3)
    else:
        codes = encode_in_integers(x, 2, 15, LARGEST_E5M2)
    return codes


@triton.jit
def encode_in_integers(x, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    dropped: tl.constexpr = 23 - MANTISSA_BITS
    # The smallest normal number as f32 bits, and the number whose last place in f32 is the smallest FP8 number: added
    # to it, a smaller one is rounded to a multiple of that.
    smallest: tl.constexpr = (128 - BIAS) << 23
    unit_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    words = x.to(tl.int32, bitcast=True)
    found = words & MAGNITUDE
    largest = tl.full(x.shape, LARGEST, tl.float32).to(tl.int32, bitcast=True)
    kept = tl.minimum(found, largest)
    normal = (kept + ((1 << (dropped - 1)) - 1) + ((kept >> dropped) & 1) - ((127 - BIAS) << 23)) >> dropped
    unit = tl.full(x.shape, unit_bits, tl.int32).to(tl.float32, bitcast=True)
    below = (kept.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - unit_bits
    codes = tl.where(kept < smallest, below, normal) | ((words >> 24) & 0x80)
    return tl.where(found > INFINITE, NAN_CODE, codes).to(tl.uint8)


@triton.jit
def decode(codes, FORMAT: tl.constexpr):
    """f32: what u8 ``codes`` stand for; every FP8 number is one of float32."""
    wide = codes.to(tl.int32)
    found = wide & 0x7F
    if FORMAT == E4M3:
        words = found << 20
        shift = tl.full(words.shape, (127 + 120) << 23, tl.int32).to(tl.float32, bitcast=True)
        is_special = found == NAN_CODE
        special = tl.full(words.shape, NOT_A_NUMBER, tl.int32)
    else:
        words = found << 21
        shift = tl.full(words.shape, (127 + 112) << 23, tl.int32).to(tl.float32, bitcast=True)
        is_special = found >= 0x7C
        special = tl.where(found == 0x7C, INFINITE, NOT_A_NUMBER)
    # One multiplication moves the exponent, of the subnormal numbers as well.
    finite = (words.to(tl.float32, bitcast=True) * shift).to(tl.int32, bitcast=True)
    magnitude = tl.where(is_special, special, finite)
    return (magnitude | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
