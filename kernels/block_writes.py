"""What the references of block updates write: a parameter in its own dtype, and codes with their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.kernels.flat_tensors import Piece
from graphopt.kernels.round_weights import stochastic_bfloat16


def write_parameter(target: Tensor, wide: Tensor, bits: Tensor | None) -> None:
    """Writes f32 ``wide`` into a parameter of any dtype; ``bits`` i32 rounds stochastically where that is bfloat16."""
    if bits is not None and target.dtype == torch.bfloat16:
        wide = stochastic_bfloat16(wide, bits)
    target.copy_(wide)


def write_codes(piece: Piece, codes: Tensor, scales: Tensor, encoded: tuple[Tensor, Tensor]) -> None:
    piece.rows(codes).copy_(encoded[0])
    piece.of_blocks(scales).copy_(encoded[1])
