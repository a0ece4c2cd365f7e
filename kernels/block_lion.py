"""Lion on an 8-bit momentum: one pass over parameter, gradient, codes and scales.

For each element, all in float32 and each operation rounded once::

    g = gradient * factor                              # unscales and clips; nothing is written if it is not finite
    p = p * (1 - lr decay)                             # decoupled; else g = g + decay p
    p = p - lr sign(beta1 m + (1 - beta1) g)           # sign(0) is 0, sign(NaN) is NaN
    m = beta2 m + (1 - beta2) g

The momentum is rounded to nearest. Source of the rule: Chen et al., Symbolic Discovery of Optimization Algorithms,
arXiv:2302.06675, algorithm 2. Bytes moved for an element, float32: parameter 4 + 4, gradient 4, codes 1 + 1, scales
8 / block.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from graphopt.kernels.block_maps import decode_signed, encode_signed
from graphopt.kernels.block_rule import BlockRule
from graphopt.kernels.block_update import BlockOptions, FlatItem, KernelSpec, rounded
from graphopt.kernels.block_writes import write_codes, write_parameter
from graphopt.kernels.counter_random import random_bits
from graphopt.kernels.flat_tensors import Piece

SPEC = KernelSpec("block_lion", num_moments=1)


@dataclass(frozen=True)
class LionScalars:
    """The numbers of one step as float32 holds them, in the order in which kernels read them."""

    keep: float  # 1 - lr * weight_decay
    weight_decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float

    @classmethod
    def of(cls, *, lr: float, weight_decay: float, beta1: float, beta2: float) -> LionScalars:
        numbers = cls(1.0 - lr * weight_decay, weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr)
        return cls(*rounded(*astuple(numbers)))


def _update_piece(
    item: FlatItem, piece: Piece, scalars: LionScalars, options: BlockOptions, factor: Tensor | None
) -> None:
    (moment,) = item.moments
    wide = piece.rows(item.parameter).to(torch.float32)
    gradient = piece.rows(item.gradient).to(torch.float32)
    if factor is not None:
        gradient = gradient * factor
    if options.decoupled:
        wide = wide * scalars.keep
    else:
        gradient = gradient + wide * scalars.weight_decay
    mean = decode_signed(piece.rows(moment.codes), piece.of_blocks(moment.scales), options.map)
    direction = mean * scalars.beta1 + gradient * scalars.one_minus_beta1
    wide = wide - _sign(direction) * scalars.lr
    mean = mean * scalars.beta2 + gradient * scalars.one_minus_beta2

    bits = None
    if options.stochastic_weight:
        start = item.offset + piece.start
        bits = random_bits(item.key, start, start + wide.numel(), device=wide.device).view(wide.shape)
    write_parameter(piece.rows(item.parameter), wide, bits)
    write_codes(piece, moment.codes, moment.scales, encode_signed(mean, options.map))


def _sign(values: Tensor) -> Tensor:
    """-1, 0 or 1, and NaN for NaN, which ``torch.sign`` may turn into 0."""
    return torch.where(torch.isnan(values), values, torch.sign(values))


_RULE = BlockRule("lion", _update_piece)
reference_ = _RULE.reference_
update_ = _RULE.update_
