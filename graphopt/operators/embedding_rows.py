"""Adding the gradient of an embedding's rows to a gradient of the whole table that is there already.

``graphopt::add_embedding_rows(gradient, rows, ids, padding_idx)`` is ``gradient + embedding_dense_backward(rows, ids)``
without the table of zeros in between; ``graphopt::add_embedding_rows_`` writes into ``gradient``.

Rows of one token are summed first, in the order of ``ids``, then added once. So on a CPU every value equals that of the
sum of two tables; only a -0.0 of ``gradient``, which adding 0.0 turns into 0.0, stays as it is. No shape depends on the
content of ``ids``, and nothing asks the device for a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("graphopt", "FRAGMENT")
LIBRARY.define("add_embedding_rows(Tensor gradient, Tensor rows, Tensor ids, int padding_idx) -> Tensor")
LIBRARY.define("add_embedding_rows_(Tensor(a!) gradient, Tensor rows, Tensor ids, int padding_idx) -> Tensor(a!)")

ADD_EMBEDDING_ROWS = torch.ops.graphopt.add_embedding_rows.default
ADD_EMBEDDING_ROWS_IN_PLACE = torch.ops.graphopt.add_embedding_rows_.default


def add_embedding_rows(gradient: Tensor, rows: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """``gradient`` [V,D] plus ``rows`` [*,D], each at its place in ``ids`` i64[*] or i32[*]; those of the padding are
    left out (-1: there is none). The result has the layout and the dtype of ``gradient``, in which rows are summed.
    """
    return add_embedding_rows_(gradient.clone(), rows, ids, padding_idx)


def add_embedding_rows_(gradient: Tensor, rows: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """``gradient`` itself, with the sum written into it; see ``add_embedding_rows``. Holds ``rows`` once more."""
    flat = ids.reshape(-1).long()
    if not flat.numel():
        return gradient
    place, token = _tokens(flat)
    summed = torch.zeros(flat.numel(), gradient.shape[1], dtype=gradient.dtype, device=rows.device)
    _accumulate(summed, place, rows.reshape(summed.shape).to(gradient.dtype))
    if padding_idx >= 0:
        summed.masked_fill_((token == padding_idx).unsqueeze(1), 0.0)
    return gradient.index_add_(0, token, summed)


def _tokens(ids: Tensor) -> tuple[Tensor, Tensor]:
    """For ``ids`` [N], the place of each one's token among the different ones; and the token of each place: [N].

    Where there are fewer than N different ones, the token is 0, and the sum there stays 0.
    """
    ordered, order = ids.sort()
    is_next = torch.zeros_like(ids)
    is_next[1:] = ordered[1:] != ordered[:-1]
    ordered_place = is_next.cumsum(0)
    place = torch.empty_like(ids).scatter_(0, order, ordered_place)
    token = torch.zeros_like(ids).scatter_(0, ordered_place, ordered)
    return place, token


def _accumulate(summed: Tensor, place: Tensor, rows: Tensor) -> None:
    """Add each row at its place among the N of ``summed``, on a CPU in the order of rows.

    On CUDA by the kernel that sorts, as ``index_add_`` there adds in no fixed order.
    """
    if summed.device.type == "cpu":
        summed.index_add_(0, place, rows)
    else:
        summed.index_put_((place,), rows, accumulate=True)


LIBRARY.impl("add_embedding_rows", add_embedding_rows, "CompositeExplicitAutograd")
LIBRARY.impl("add_embedding_rows_", add_embedding_rows_, "CompositeExplicitAutograd")


@torch.library.register_fake("graphopt::add_embedding_rows", lib=LIBRARY)
def _added(gradient: Tensor, rows: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    return torch.empty_like(gradient)


@torch.library.register_fake("graphopt::add_embedding_rows_", lib=LIBRARY)
def _added_in_place(gradient: Tensor, rows: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    return gradient
