"""Weights narrower than their update: stochastic rounding to bfloat16, and bfloat16 with the lost bits kept apart."""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.kernels import cpu_calls
from graphopt.kernels.counter_random import Key, key_of, random_bits
from graphopt.kernels.flat_tensors import ELEMENTS_OF_A_PIECE, flat, is_dense

_LOW_HALF = 0xFFFF
_EXPONENT = 0x7F800000
_QUIET = 0x0040
_HALF_OF_LOW = 0x8000


def stochastic_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """bf16 like f32 ``values``, one of the two neighbours with a probability as its nearness; inf and NaN stay.

    ``bits``: i32 of the shape of ``values``; the lower 16 are the draw, added below the last bit that is kept. What
    lies above the largest bfloat16 may become inf, as in rounding to nearest.
    """
    words = values.view(torch.int32)
    drawn = words + (bits & _LOW_HALF) & ~_LOW_HALF
    is_finite = (words & _EXPONENT) != _EXPONENT
    return torch.where(is_finite, drawn.view(torch.float32), values).to(torch.bfloat16)


def round_stochastically(values: Tensor, *, seed: int, step: float, offset: int) -> Tensor:
    """bf16 in the layout of f32 ``values`` (contiguous where that is not dense); element i in memory order draws number
    ``offset + i`` of (seed, step). Memory of its own: the result and temporaries of a bounded size."""
    values = values if is_dense(values) else values.contiguous()
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    source, target, key = flat(values), flat(rounded), key_of(seed, step)
    if not cpu_calls.round_stochastically(source, target, key, offset):
        _round_in_torch(source, target, key, offset)
    return rounded


def _round_in_torch(source: Tensor, target: Tensor, key: Key, offset: int) -> None:
    for start in range(0, source.numel(), ELEMENTS_OF_A_PIECE):
        stop = min(source.numel(), start + ELEMENTS_OF_A_PIECE)
        bits = random_bits(key, offset + start, offset + stop, device=source.device)
        target[start:stop] = stochastic_bfloat16(source[start:stop], bits)


def split_remainder(values: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 nearest to f32 ``values`` (ties away from zero) and i16, the distance to it in last places of f32.

    ``join_remainder`` gives back the same float32 bit for bit; of a NaN it gives a NaN, whose payload may differ.
    """
    words = values.view(torch.int32)
    high = words + _HALF_OF_LOW & ~_LOW_HALF
    low = words - high
    is_nan = torch.isnan(values)
    high = torch.where(is_nan, words & ~_LOW_HALF | _QUIET << 16, high)
    low = torch.where(is_nan, 0, low)
    return high.view(torch.float32).to(torch.bfloat16), low.to(torch.int16)


def join_remainder(weights: Tensor, remainder: Tensor) -> Tensor:
    """f32: the value that ``split_remainder`` took apart into bf16 ``weights`` and i16 ``remainder``."""
    return (weights.to(torch.float32).view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)
