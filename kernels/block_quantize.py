"""A tensor to 8-bit codes with one scale a block, and back; the maps are in ``block_maps``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.kernels import cpu_calls
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


def quantize(values: Tensor, *, block: int, map: str, is_signed: bool, draw: Draw | None = None) -> Moment:
    """What ``quantize_reference`` gives, by the fastest form there is."""
    check_block(block)
    check_map(map)
    values = values if is_dense(values) else values.contiguous()
    into = _empty_moment(values, block=block, is_signed=is_signed)
    source, target = flat(values), Moment(flat(into.codes), into.scales)
    key = None if draw is None else (key_of(draw.seed, draw.step), draw.offset)
    if values.is_cuda:
        from graphopt.kernels import block_quantize_triton  # Triton exists on Linux alone

        block_quantize_triton.quantize(source, target, block, map, key)
    elif not cpu_calls.quantize(source, target, block, map, key):
        _quantize_in_torch(source, target, block, map, draw)
    return into


def dequantize(moment: Moment, *, block: int, map: str) -> Tensor:
    """What ``dequantize_reference`` gives, by the fastest form there is."""
    check_block(block)
    check_map(map)
    values = torch.empty_like(moment.codes, dtype=torch.float32)
    source, target = Moment(flat(moment.codes), moment.scales), flat(values)
    if values.is_cuda:
        from graphopt.kernels import block_quantize_triton  # Triton exists on Linux alone

        block_quantize_triton.dequantize(source, target, block, map)
    elif not cpu_calls.dequantize(source, target, block, map):
        _dequantize_in_torch(source, target, block, map)
    return values


def quantize_reference(values: Tensor, *, block: int, map: str, is_signed: bool, draw: Draw | None = None) -> Moment:
    """Codes in the layout of f32 ``values`` (contiguous where that is not dense) and scales, in plain torch.

    ``is_signed``: i8 codes of a first moment; else u8 codes of a second one, none of whose values is below 0, rounded
    stochastically if ``draw`` is given. Raises ValueError for a block or map that does not exist.
    """
    check_block(block)
    check_map(map)
    values = values if is_dense(values) else values.contiguous()
    into = _empty_moment(values, block=block, is_signed=is_signed)
    _quantize_in_torch(flat(values), Moment(flat(into.codes), into.scales), block, map, draw)
    return into


def dequantize_reference(moment: Moment, *, block: int, map: str) -> Tensor:
    """f32 in the layout of the codes: what codes and scales stand for, in plain torch."""
    check_block(block)
    check_map(map)
    values = torch.empty_like(moment.codes, dtype=torch.float32)
    _dequantize_in_torch(Moment(flat(moment.codes), moment.scales), flat(values), block, map)
    return values


def _empty_moment(values: Tensor, *, block: int, is_signed: bool) -> Moment:
    codes = torch.empty_like(values, dtype=torch.int8 if is_signed else torch.uint8)
    return Moment(codes, values.new_empty(num_blocks(values.numel(), block)))


def _quantize_in_torch(source: Tensor, into: Moment, block: int, map: str, draw: Draw | None) -> None:
    for piece in pieces(source.numel(), block):
        rows = piece.rows(source)
        if into.codes.dtype == torch.int8:
            codes, scales = encode_signed(rows, map)
        else:
            codes, scales = encode_unsigned(rows, map, None if draw is None else _uniforms(draw, piece.start, rows))
        piece.rows(into.codes).copy_(codes)
        piece.of_blocks(into.scales).copy_(scales)


def _dequantize_in_torch(source: Moment, values: Tensor, block: int, map: str) -> None:
    decode = decode_signed if source.codes.dtype == torch.int8 else decode_unsigned
    for piece in pieces(values.numel(), block):
        piece.rows(values).copy_(decode(piece.rows(source.codes), piece.of_blocks(source.scales), map))


def _uniforms(draw: Draw, start: int, rows: Tensor) -> Tensor:
    first = draw.offset + start
    bits = random_bits(key_of(draw.seed, draw.step), first, first + rows.numel(), device=rows.device)
    return uniform(bits).view(rows.shape)
