"""Where the state tensors of one parameter lie in the pages that hold them, and in what a range of them needs.

Each tensor is one run of bytes, in the parameter's memory order, so it is a tensor of its own for whoever looks at it,
and a range of a parameter's elements is one run in each::

    pages    | exp_avg  . . . . . . . . | exp_avg_scale . . | exp_avg_sq . . . . . . |
    range k           |. . .|                    |.|                  |. . .|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

    def elements(self, start: int, stop: int) -> tuple[int, int]:
        """Which of its elements belong to the parameter's from ``start`` (a multiple of ``block``) to ``stop``."""
        return start // self.block, -(-stop // self.block)


@dataclass(frozen=True)
class PageLayout:
    """The state tensors of a parameter of ``numel`` elements, in ``nbytes`` bytes."""

    numel: int
    slots: tuple[PagedSlot, ...]
    nbytes: int


def page_layout(slots: tuple[StateSlot, ...], numel: int, updated_dtype: torch.dtype) -> PageLayout:
    """The layout for ``numel`` elements, whole parameters or ranges; ``updated_dtype``: what they are updated in."""
    found, start = [], 0
    for slot in slots:
        block = slot.block or 1
        dtype = torch.float32 if slot.block else slot.dtype or updated_dtype
        found.append(PagedSlot(slot.name, dtype, start, -(-numel // block), block, slot.block is not None))
        start = -(-(start + found[-1].nbytes) // ALIGNMENT) * ALIGNMENT
    return PageLayout(numel, tuple(found), start)
