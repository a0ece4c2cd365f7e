"""Tensors as the flat run of elements that lies in memory: what block kernels number their elements and blocks by.

A parameter may have any dense layout (a permutation of contiguous). Its codes have the same layout, so element ``i`` in
memory order of the parameter is element ``i`` in memory order of the codes, and a block is ``block`` neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# A program of a GPU kernel and the scratch of a CPU thread hold one whole block. 16384 elements are 320 KiB of scratch,
# which fit in a second-level cache; above 4096 a GPU's registers do not hold them.
MOST_ELEMENTS_OF_A_BLOCK = 16384
# How many elements the plain torch form works on at a time: about a dozen float32 temporaries of 1 MiB.
ELEMENTS_OF_A_PIECE = 1 << 18


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a flat tensor: ``num_blocks`` equal blocks from ``first_block``."""

    start: int
    stop: int
    first_block: int
    num_blocks: int

    def rows(self, flat: Tensor) -> Tensor:
        """View of these elements of ``flat``, as [num_blocks, elements of a block]."""
        return flat[self.start : self.stop].view(self.num_blocks, -1)

    def of_blocks(self, scales: Tensor) -> Tensor:
        """View of what ``scales`` [blocks of the tensor] holds for these blocks."""
        return scales[self.first_block : self.first_block + self.num_blocks]


def pieces(num_elements: int, block: int) -> Iterator[Piece]:
    """Pieces that cover ``num_elements`` in order: full blocks, then the ragged last block alone."""
    num_full = num_elements // block
    blocks_of_a_piece = max(1, ELEMENTS_OF_A_PIECE // block)
    for first in range(0, num_full, blocks_of_a_piece):
        last = min(num_full, first + blocks_of_a_piece)
        yield Piece(first * block, last * block, first, last - first)
    if num_elements % block:
        yield Piece(num_full * block, num_elements, num_full, 1)


def num_blocks(num_elements: int, block: int) -> int:
    return -(-num_elements // block)


def check_block(block: int) -> None:
    """Raises ValueError unless ``block`` is a number of elements that the kernels can hold."""
    if not 1 <= block <= MOST_ELEMENTS_OF_A_BLOCK:
        raise ValueError(
            f"a block has 1 to {MOST_ELEMENTS_OF_A_BLOCK} elements, not {block}; take 256 (the default) or 2048"
        )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gap or overlap, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order: a view of shape [numel].

    Raises ValueError for a tensor that is not dense.
    """
    if not is_dense(tensor):
        raise ValueError(
            f"expected a dense tensor (contiguous, or a permutation of it), got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; pass tensor.contiguous() and copy the result back"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def has_layout_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether both lie in memory in the same order of elements; both have one shape."""
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    return all(
        mine == theirs
        for mine, theirs, size in zip(tensor.stride(), other.stride(), other.shape, strict=True)
        if size != 1
    )


def flat_like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` flat in the memory order of ``other``: a view, or a copy where the two lie differently."""
    if not has_layout_of(tensor, other) and tensor.numel():
        tensor = torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)
    return flat(tensor)
