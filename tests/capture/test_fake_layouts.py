"""Normalisations: fake and real layouts and dtypes agree, numbers are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.fake_layouts import correct_fake_layouts
from graphopt.ir.fake import FakeTensorMode


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


aten = torch.ops.aten


def layer_norm(x, weight):
    return aten.native_layer_norm.default(x, [8], weight, weight, 1e-5)


def layer_norm_backward(x, weight):
    return aten.native_layer_norm_backward.default(x, x, [8], *layer_norm(x, weight)[1:], weight, weight, [True] * 3)


def group_norm(x, weight):
    return aten.native_group_norm.default(x, weight, weight, 4, 8, 8, 2, 1e-5)


def group_norm_backward(x, weight):
    return aten.native_group_norm_backward.default(x, x, *group_norm(x, weight)[1:], weight, 4, 8, 8, 2, [True] * 3)


@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("call", [layer_norm, layer_norm_backward, group_norm, group_norm_backward])
def test_statistics_have_the_dtype_that_the_kernel_gives(call, dtype, weight_dtype):
    correct_fake_layouts()
    x, weight = torch.randn(4, 8, 8).to(dtype), torch.ones(8, dtype=weight_dtype or dtype)
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor(x), mode.from_tensor(weight))
    real = call(x, weight)
    assert [(value.dtype, value.shape, value.stride()) for value in fake] == [
        (value.dtype, value.shape, value.stride()) for value in real
    ]
