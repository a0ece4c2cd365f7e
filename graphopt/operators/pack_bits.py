"""Zeros and ones kept as one bit an element.

``graphopt::pack_bits(mask)`` is u8[ceil(n / 8)]: bit i of byte j says whether element ``8 j + i`` of the mask, in
row-major order, is not 0; bits beyond the last element are 0. ``graphopt::unpack_bits(packed, size, dtype)`` gives the
zeros and ones back, contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 8


@torch.library.custom_op("graphopt::pack_bits", mutates_args=())
def pack_bits(mask: Tensor) -> Tensor:
    """u8[ceil(n / 8)] of a mask of n elements, any shape, dtype and layout. Holds one byte an element while it runs."""
    flags = (mask != 0).reshape(-1)
    missing = -flags.numel() % _BITS
    if missing:
        flags = torch.cat((flags, flags.new_zeros(missing)))
    columns = flags.view(torch.uint8).view(-1, _BITS)
    packed = columns[:, 0].clone()
    for bit in range(1, _BITS):
        packed.bitwise_or_(columns[:, bit].bitwise_left_shift(bit))
    return packed


@torch.library.custom_op("graphopt::unpack_bits", mutates_args=())
def unpack_bits(packed: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The mask [*size] in ``dtype``, contiguous. Holds one byte an element beside it while it runs."""
    num_elements = math.prod(size)
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.view(-1)[:num_elements].to(dtype, copy=True).view(tuple(size))


@pack_bits.register_fake
def _packed(mask: Tensor) -> Tensor:
    return mask.new_empty(-(-mask.numel() // _BITS), dtype=torch.uint8)


@unpack_bits.register_fake
def _unpacked(packed: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(tuple(size), dtype=dtype)


PACK_BITS = pack_bits._opoverload
UNPACK_BITS = unpack_bits._opoverload
