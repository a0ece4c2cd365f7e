"""A tensor to 8-bit codes with one scale a block, and back; the maps are in ``block_maps``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.kernels.block_maps import check_map, decode_signed, decode_unsigned, encode_signed, encode_unsigned
from graphopt.kernels.block_update import Moment
from graphopt.kernels.counter_random import key_of, random_bits, uniform
from graphopt.kernels.flat_tensors import check_block, flat, is_dense, num_blocks, pieces


@dataclass(frozen=True)
class Draw:
    """Names the random numbers of a stochastic rounding: element i in memory order takes number ``offset + i``."""

    seed: int
    step: float
    offset: int = 0


def quantize_reference(values: Tensor, *, block: int, map: str, is_signed: bool, draw: Draw | None = None) -> Moment:
    """Codes in the layout of f32 ``values`` (contiguous where that is not dense) and scales, in plain torch.

    ``is_signed``: i8 codes of a first moment; else u8 codes of a second one, none of whose values is below 0, rounded
    stochastically if ``draw`` is given. Raises ValueError for a block or map that does not exist.
    """
    check_block(block)
    check_map(map)
    values = values if is_dense(values) else values.contiguous()
    codes = torch.empty_like(values, dtype=torch.int8 if is_signed else torch.uint8)
    scales = values.new_empty(num_blocks(values.numel(), block))
    source, target = flat(values), flat(codes)
    for piece in pieces(values.numel(), block):
        rows = piece.rows(source)
        if is_signed:
            encoded = encode_signed(rows, map)
        else:
            encoded = encode_unsigned(rows, map, None if draw is None else _uniforms(draw, piece.start, rows))
        piece.rows(target).copy_(encoded[0])
        piece.of_blocks(scales).copy_(encoded[1])
    return Moment(codes, scales)


def dequantize_reference(moment: Moment, *, block: int, map: str) -> Tensor:
    """f32 in the layout of the codes: what codes and scales stand for, in plain torch."""
    check_block(block)
    check_map(map)
    values = torch.empty_like(moment.codes, dtype=torch.float32)
    source, target = flat(moment.codes), flat(values)
    decode = decode_signed if moment.codes.dtype == torch.int8 else decode_unsigned
    for piece in pieces(values.numel(), block):
        piece.rows(target).copy_(decode(piece.rows(source), piece.of_blocks(moment.scales), map))
    return values


def _uniforms(draw: Draw, start: int, rows: Tensor) -> Tensor:
    first = draw.offset + start
    bits = random_bits(key_of(draw.seed, draw.step), first, first + rows.numel(), device=rows.device)
    return uniform(bits).view(rows.shape)
