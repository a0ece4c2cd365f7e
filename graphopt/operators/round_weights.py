"""Narrow weights as operators: rounding to bfloat16 by counted random numbers, and the bits that bfloat16 drops."""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.kernels import round_weights as kernel


@torch.library.custom_op("graphopt::round_stochastically", mutates_args=())
def round_stochastically(x: Tensor, seed: int, step: float, offset: int) -> Tensor:
    """bf16 of f32 ``x``: a neighbour with a probability as its nearness. See ``graphopt.kernels.round_weights``."""
    return kernel.round_stochastically(x, seed=seed, step=step, offset=offset)


@torch.library.custom_op("graphopt::split_remainder", mutates_args=())
def split_remainder(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 and i16 that hold f32 ``x`` exactly."""
    return kernel.split_remainder(x)


@torch.library.custom_op("graphopt::join_remainder", mutates_args=())
def join_remainder(weight: Tensor, remainder: Tensor) -> Tensor:
    """f32 that ``split_remainder`` took apart."""
    return kernel.join_remainder(weight, remainder)


@round_stochastically.register_fake
def _rounded_fake(x: Tensor, seed: int, step: float, offset: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


@split_remainder.register_fake
def _split_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)


@join_remainder.register_fake
def _join_fake(weight: Tensor, remainder: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=torch.float32)
