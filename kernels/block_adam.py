"""Adam and AdamW on 8-bit moments: one pass over parameter, gradient, codes and scales.

For each element, all in float32 and each operation rounded once, in the order of ``torch.optim.AdamW``::

    g = gradient * factor                              # unscales and clips; nothing is written if it is not finite
    p = p * (1 - lr decay)                             # decoupled; else g = g + decay p
    m = m + (1 - beta1) (g - m)
    v = beta2 v + ((1 - beta2) g) g
    p = p - (lr / (1 - beta1^t) m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)

with m and v decoded from the codes; p uses them fresh, before they are encoded again. Scalars are computed in double on
the host and rounded once. A gradient that is not finite (without a factor that says so) makes its block of moments NaN.

Bytes moved for an element, float32: parameter 4 + 4, gradient 4, codes 2 + 2, scales 16 / block.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import sqrt

import torch
from torch import Tensor

from graphopt.kernels.block_maps import decode_signed, decode_unsigned, encode_signed, encode_unsigned
from graphopt.kernels.block_rule import BlockRule
from graphopt.kernels.block_update import BlockOptions, FlatItem, KernelSpec, rounded
from graphopt.kernels.block_writes import write_codes, write_parameter
from graphopt.kernels.counter_random import random_bits, uniform
from graphopt.kernels.exact_root import exact_root
from graphopt.kernels.flat_tensors import Piece

SPEC = KernelSpec("block_adam", num_moments=2)


@dataclass(frozen=True)
class AdamScalars:
    """The numbers of one step as float32 holds them, in the order in which kernels read them."""

    keep: float  # 1 - lr * weight_decay
    weight_decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    root_of_correction2: float  # sqrt(1 - beta2^step)
    eps: float
    step_size: float  # lr / (1 - beta1^step)

    @classmethod
    def of(cls, *, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, step: float) -> AdamScalars:
        """``step`` counts from 1: the step that is being taken. Raises ValueError below that."""
        if step <= 0:
            raise ValueError(f"a step of Adam counts from 1 (bias correction divides by 1 - beta^step), got {step}")
        numbers = cls(
            keep=1.0 - lr * weight_decay,
            weight_decay=weight_decay,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            root_of_correction2=sqrt(1.0 - beta2**step),
            eps=eps,
            step_size=lr / (1.0 - beta1**step),
        )
        return cls(*rounded(*astuple(numbers)))


def _update_piece(
    item: FlatItem, piece: Piece, scalars: AdamScalars, options: BlockOptions, factor: Tensor | None
) -> None:
    first, second = item.moments
    wide = piece.rows(item.parameter).to(torch.float32)
    gradient = piece.rows(item.gradient).to(torch.float32)
    if factor is not None:
        gradient = gradient * factor
    if options.decoupled:
        wide = wide * scalars.keep
    else:
        gradient = gradient + wide * scalars.weight_decay
    mean = decode_signed(piece.rows(first.codes), piece.of_blocks(first.scales), options.map)
    square = decode_unsigned(piece.rows(second.codes), piece.of_blocks(second.scales), options.map)
    mean = mean + (gradient - mean) * scalars.one_minus_beta1
    square = square * scalars.beta2 + gradient * scalars.one_minus_beta2 * gradient
    root = exact_root(square) / torch.full_like(square[:1, :1], scalars.root_of_correction2)
    wide = wide - mean * scalars.step_size / (root + scalars.eps)

    bits = None
    if options.stochastic_state or options.stochastic_weight:
        start = item.offset + piece.start
        bits = random_bits(item.key, start, start + wide.numel(), device=wide.device).view(wide.shape)
    write_parameter(piece.rows(item.parameter), wide, bits if options.stochastic_weight else None)
    draw = uniform(bits) if bits is not None and options.stochastic_state else None
    write_codes(piece, first.codes, first.scales, encode_signed(mean, options.map))
    write_codes(piece, second.codes, second.scales, encode_unsigned(square, options.map, draw))


_RULE = BlockRule("adam", _update_piece)
reference_ = _RULE.reference_
update_ = _RULE.update_
