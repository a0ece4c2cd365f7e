"""Batch normalisation of transposed inputs: fake and real layouts agree, numbers are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.after = nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(self.before(x).transpose(1, 2)).transpose(1, 2)
        return {"loss": self.after(h).square().mean()}


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.after = nn.Linear(4, 3)

    def forward(self, x):
        return {"loss": self.after(self.norm(x).permute(0, 2, 3, 1).reshape(-1, 4)).square().mean()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["transposed", "channels-last"])
def test_transposed_normalisation_is_eager(kind, training):
    torch.manual_seed(0)
    if kind == "transposed":
        model, x = Transposed(), torch.randn(4, 5, 8)
    else:
        model, x = ChannelsLast(), torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last)
    model.train(training)
    twin = copy.deepcopy(model)
    expected = twin(x)["loss"]
    expected.backward()
    out = graphopt.compile(model, outputs=["loss"])(x)
    out.loss.backward()
    assert torch.equal(out.loss, expected)
    for parameter, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)
