"""Random bits that depend on (seed, step, index) alone: the same in torch, C++ and Triton, and after a resume.

A step has a key of 64 bits, made on the host from seed and step (SplitMix64). The bits of element ``index`` (64 bits)::

    bits = mix(mix((low ^ key_low) + high * STRIDE) ^ key_high)        # all in 32 bits, wrapping

where ``low`` and ``high`` are the halves of ``index`` and ``mix`` is a bijection of 32 bits (two multiplications and
three xor-shifts; constants by C. Wellons, https://github.com/skeeto/hash-prospector, bias 0.107). Within one step
elements whose ``high`` is equal never share bits; the key in the middle gives each step another permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STRIDE = 0x9E3779B9
MIX_FIRST = 0x21F0AAAD
MIX_SECOND = 0xD35A2D97
_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1


@dataclass(frozen=True)
class Key:
    """Two words of 32 bits; ``packed`` holds both as one signed 64-bit integer, as tables of integers carry it."""

    low: int
    high: int

    @property
    def packed(self) -> int:
        return signed(self.high << 32 | self.low, 64)


def key_of(seed: int, step: float) -> Key:
    """The key of a step: ``seed`` any integer (its low 64 bits count), ``step`` a whole number from 0."""
    mixed = _split_mix(_split_mix(seed & _MASK_64) ^ (int(step) & _MASK_64))
    return Key(mixed & _MASK_32, mixed >> 32)


def signed(bits: int, width: int) -> int:
    """The two's complement reading of ``bits``, as torch's integers and ctypes take it."""
    return bits - (1 << width) if bits >> (width - 1) else bits


def random_bits(key: Key, start: int, stop: int, *, device: torch.device) -> Tensor:
    """i32[stop - start]: 32 random bits for each index from ``start`` to ``stop``."""
    index = torch.arange(start, stop, dtype=torch.int64, device=device)
    low = index.to(torch.int32)
    high = (index >> 32).to(torch.int32)
    bits = (low ^ signed(key.low, 32)) + high * signed(STRIDE, 32)
    return _mix(_mix(bits) ^ signed(key.high, 32))


def uniform(bits: Tensor) -> Tensor:
    """f32 in [0, 1): the upper 16 of the random bits, which leaves the lower 16 for another draw."""
    return (bits >> 16 & 0xFFFF).to(torch.float32) * 2.0**-16


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 16)) * signed(MIX_FIRST, 32)
    bits = (bits ^ _shifted(bits, 15)) * signed(MIX_SECOND, 32)
    return bits ^ _shifted(bits, 15)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift to the right that fills with zeros; torch's own repeats the sign."""
    return bits >> places & (1 << (32 - places)) - 1


def _split_mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK_64
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK_64
    return word ^ word >> 31
