"""Dropout on a CPU draws as eager does, whatever the memory order of its input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt

VIEWS = {
    "positions": (lambda x: x[None].expand(5, -1, -1), (4, 6)),
    "row": (lambda x: x.expand(4, 4), (4,)),
    "middle": (lambda x: x[:, None].expand(-1, 3, -1), (4, 6)),
    "last": (lambda x: x[..., None].expand(-1, -1, 3), (4, 6)),
    "slice": (lambda x: x[:, 1:5:2], (4, 6)),
    "transposed": (lambda x: x.t(), (4, 6)),
    "permuted": (lambda x: x.permute(2, 0, 1), (3, 4, 5)),
    "permuted_slice": (lambda x: x.permute(1, 2, 0)[:, 1:], (3, 4, 5)),
    "permuted_expanded": (lambda x: x[None].expand(3, -1, -1).permute(2, 0, 1), (4, 6)),
}


class Dropped(nn.Module):
    def __init__(self, view, probability) -> None:
        super().__init__()
        self.view, self.probability = view, probability

    def forward(self, x):
        return {"dropped": F.dropout(self.view(x), self.probability)}


@pytest.mark.parametrize("probability", [0.4, 1.0])
@pytest.mark.parametrize("name", VIEWS)
def test_dropout_of_a_view_equals_eager(name, probability):
    view, shape = VIEWS[name]
    model, x = Dropped(view, probability), torch.randn(shape)
    compiled = graphopt.compile(model)
    compiled(x)
    torch.manual_seed(3)
    expected = model(x)["dropped"]
    torch.manual_seed(3)
    found = compiled(x)["dropped"]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
