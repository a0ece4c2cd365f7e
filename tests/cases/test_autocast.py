"""The user's own autocast, around the call and inside the model: numbers are eager's, outside it nothing is cast."""

from __future__ import annotations

import copy

import torch
from torch import nn

import graphopt


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def assert_same_gradients(model, twin):
    for (name, parameter), reference in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad), name


def test_autocast_around_the_call():
    model = network()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    module = graphopt.compile(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, out = twin(x), module(x)["0"]
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    expected.float().sum().backward()
    out.float().sum().backward()
    assert_same_gradients(model, twin)
    assert torch.equal(module(x)["0"], twin(x))


def test_autocast_inside_the_model_after_an_evaluation():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.network(x)
            return h.float().square().mean()

    model = Inside()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    module = graphopt.compile(model)
    with torch.no_grad():
        module(x)
    out = module(x)["0"]
    out.backward()
    expected = twin(x)
    expected.backward()
    assert torch.equal(out, expected)
    assert_same_gradients(model, twin)
