"""Where the state tensors of one parameter lie in the pages that hold them, and in what a range of them needs.

Each tensor is one run of bytes, in the parameter's memory order, so it is a tensor of its own for whoever looks at it,
and a range of a parameter's elements is one run in each::

    pages    | exp_avg  . . . . . . . . | exp_avg_scale . . | exp_avg_sq . . . . . . |
    range k           |. . .|                    |.|                  |. . .|
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.ir.spec import TensorSpec
from graphopt.optim.state import StateSlot

ALIGNMENT = 64
"""Bytes. A tensor in the pages, or in a staging buffer, begins at a multiple: that of torch's CPU allocator, so that
vectorised loops meet what they meet in memory of their own."""


@dataclass(frozen=True)
class PagedSlot:
    """One state tensor at byte ``start``: ``numel`` elements of ``dtype``, one for every ``block`` of the parameter's
    (``is_by_blocks``: in a row of its own, not in the parameter's shape).
    """

    name: str
    dtype: torch.dtype
    start: int
    numel: int
    block: int
    is_by_blocks: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize

    def spec(self, parameter: TensorSpec) -> TensorSpec:
        """The spec of the tensor as whoever looks at it sees it, on the host."""
        host = torch.device("cpu")
        if self.is_by_blocks:
            return TensorSpec((self.numel,), self.dtype, (1,), host)
        return TensorSpec(parameter.shape, self.dtype, parameter.stride, host)

    def elements(self, start: int, stop: int) -> tuple[int, int]:
        """Which of its elements belong to the parameter's from ``start`` (a multiple of ``block``) to ``stop``."""
        return start // self.block, -(-stop // self.block)


@dataclass(frozen=True)
class PageLayout:
    """The state tensors of a parameter of ``numel`` elements, in ``nbytes`` bytes."""

    numel: int
    slots: tuple[PagedSlot, ...]
    nbytes: int


def layout_of(tensors: Mapping[str, Tensor], parameter: TensorSpec, block: int) -> PageLayout:
    """The layout for state that is there: one element for each of the parameter's, or one a ``block`` of them."""
    slots = []
    for name, tensor in tensors.items():
        is_by_blocks = tuple(tensor.shape) != parameter.shape
        slots.append(StateSlot(name, tensor.dtype, block if is_by_blocks else None))
    return page_layout(tuple(slots), parameter.numel, parameter.dtype)


def page_layout(slots: tuple[StateSlot, ...], numel: int, updated_dtype: torch.dtype) -> PageLayout:
    """The layout for ``numel`` elements, whole parameters or ranges; ``updated_dtype``: what they are updated in."""
    found, start = [], 0
    for slot in slots:
        block = slot.block or 1
        dtype = torch.float32 if slot.block else slot.dtype or updated_dtype
        found.append(PagedSlot(slot.name, dtype, start, -(-numel // block), block, slot.block is not None))
        start = -(-(start + found[-1].nbytes) // ALIGNMENT) * ALIGNMENT
    return PageLayout(numel, tuple(found), start)
