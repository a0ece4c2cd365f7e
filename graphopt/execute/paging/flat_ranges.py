"""Tensors as the runs of elements that lie in a parameter's memory, piece by piece."""

from __future__ import annotations

from torch import Tensor


class FlatRanges:
    """Ranges of ``tensor``, of any layout, in the memory order of the dense ``parameter``; both have one shape."""

    def __init__(self, tensor: Tensor, parameter: Tensor) -> None:
        order = sorted(range(parameter.dim()), key=lambda dim: (-parameter.stride(dim), parameter.shape[dim] == 1))
        self._rows = tensor.detach().permute(order)
        self._is_flat = self._rows.is_contiguous()
        self._row_elements = max(1, tensor.numel() // max(1, self._rows.shape[0])) if self._rows.dim() else 1

    def piece(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``: a view, or where the layouts differ a copy of the rows they lie in."""
        if self._is_flat:
            return self._rows.view(-1)[start:stop]
        first, last = start // self._row_elements, -(-stop // self._row_elements)
        before = first * self._row_elements
        return self._rows[first:last].contiguous().view(-1)[start - before : stop - before]
