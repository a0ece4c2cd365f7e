"""The forms that a block update has, and which of them runs: compiled for the CPU, Triton, or plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor

from graphopt.kernels import cpu_calls
from graphopt.kernels.block_update import BlockItem, BlockOptions, FlatItem, flat_items, is_skipped
from graphopt.kernels.flat_tensors import Piece, pieces


@dataclass(frozen=True)
class BlockRule:
    """An optimizer's update: ``name``, as its compiled function and its Triton module have it, and ``update_piece``,
    which is the update of one piece of an item in plain torch.

    ``scalars``: the rule's own dataclass of numbers, in the order in which kernels read them.
    """

    name: str
    update_piece: Callable[[FlatItem, Piece, Any, BlockOptions, Tensor | None], None]

    def reference_(
        self, items: Sequence[BlockItem], scalars: Any, options: BlockOptions, *, factor: Tensor | None, step: float
    ) -> None:
        """The update in plain torch, in place. Temporaries are of a bounded size."""
        if not is_skipped(factor):
            self._update_in_torch(flat_items(items, options, step), scalars, options, factor)

    def update_(
        self, items: Sequence[BlockItem], scalars: Any, options: BlockOptions, *, factor: Tensor | None, step: float
    ) -> None:
        """The update in place of all ``items`` (on one device) by the fastest form there is.

        ``factor``: f32 scalar tensor that multiplies every gradient; where it is not finite nothing is written.
        """
        flat = flat_items(items, options, step)
        if flat and flat[0].parameter.is_cuda:
            # Triton exists on Linux alone.
            triton_form = importlib.import_module(f"graphopt.kernels.block_{self.name}_triton")
            triton_form.update_(flat, scalars, options, factor)
            return
        if is_skipped(factor):
            return
        number = 1.0 if factor is None else float(factor)
        if not cpu_calls.update(self.name, flat, astuple(scalars), options, number):
            self._update_in_torch(flat, scalars, options, factor)

    def _update_in_torch(
        self, items: Sequence[FlatItem], scalars: Any, options: BlockOptions, factor: Tensor | None
    ) -> None:
        for item in items:
            for piece in pieces(item.parameter.numel(), options.block):
                self.update_piece(item, piece, scalars, options, factor)
