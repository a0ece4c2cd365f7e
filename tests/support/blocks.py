"""Block-INT8 parameters for tests: items in every dtype and layout, copies, equality to the bit, and float32 Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphopt.kernels.block_adam import AdamScalars
from graphopt.kernels.block_lion import LionScalars
from graphopt.kernels.block_update import BlockItem, BlockOptions, Moment
from graphopt.kernels.flat_tensors import num_blocks

MOMENT_DTYPES = (torch.int8, torch.uint8)


def adam_scalars(step: int, **changed: float) -> AdamScalars:
    numbers = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | changed
    return AdamScalars.of(step=step, **numbers)


def lion_scalars(step: int, **changed: float) -> LionScalars:
    return LionScalars.of(**({"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99} | changed))


def options(**changed: object) -> BlockOptions:
    return replace(BlockOptions(block=256, map="companded", decoupled=True), **changed)


def empty_moments(parameter: Tensor, block: int, num_moments: int) -> tuple[Moment, ...]:
    scales = num_blocks(parameter.numel(), block)
    return tuple(
        Moment(torch.zeros_like(parameter, dtype=dtype), torch.zeros(scales, device=parameter.device))
        for dtype in MOMENT_DTYPES[:num_moments]
    )


def item_of(parameter: Tensor, gradient: Tensor, *, block: int = 256, num_moments: int = 2, seed: int = 5) -> BlockItem:
    return BlockItem(parameter, gradient, empty_moments(parameter, block, num_moments), seed, 0)


def copy_of(item: BlockItem) -> BlockItem:
    moments = tuple(Moment(moment.codes.clone(), moment.scales.clone()) for moment in item.moments)
    return replace(item, parameter=item.parameter.clone(), moments=moments)


def written(item: BlockItem) -> list[Tensor]:
    return [item.parameter, *(tensor for moment in item.moments for tensor in (moment.codes, moment.scales))]


def assert_same_bits(found: Sequence[BlockItem], expected: Sequence[BlockItem]) -> None:
    """Equal in all that an update writes; NaN equals NaN, whose payload no form promises."""
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(written(one), written(other), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@dataclass
class Float32Adam:
    """Adam without decay on float32 state, as ``torch.optim.Adam`` computes it; ``update`` is the last change."""

    parameter: Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr: float = 1e-3

    def __post_init__(self) -> None:
        self.mean = torch.zeros_like(self.parameter)
        self.square = torch.zeros_like(self.parameter)
        self.update = torch.zeros_like(self.parameter)

    def step(self, gradient: Tensor, step: int) -> None:
        self.mean.lerp_(gradient, 1 - self.beta1)
        self.square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = self.square.sqrt() / (1 - self.beta2**step) ** 0.5
        self.update = -self.lr / (1 - self.beta1**step) * self.mean / (root + self.eps)
        self.parameter += self.update
