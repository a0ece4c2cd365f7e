"""split-linear: linear layers as the products that they are in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes.split_linear import SplitLinear
from tests.support.graphs import program_of, run_pass, targets


def captured(model, x):
    return graphopt.capture(model, x)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (2, 2, 3, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_becomes_one_product_of_matrices(shape, bias):
    program = captured(nn.Linear(8, 16, bias=bias), torch.randn(shape))
    after, record = run_pass(SplitLinear(), program)
    assert record.changes == 1
    assert [name for name in targets(after) if name.endswith("mm")] == ["addmm" if bias else "mm"]


def test_an_input_that_is_no_matrix_in_memory_is_copied_first():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, x):
            return self.layer(x.transpose(1, 2))

    after, _ = run_pass(SplitLinear(), captured(Turned(), torch.randn(3, 8, 5)))
    assert "clone" in targets(after) and "linear" not in targets(after)


def test_one_input_of_several_layers_stays_one():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    _, record = run_pass(SplitLinear(), captured(Three(), torch.randn(5, 8)))
    assert record.changes == 3


def test_other_products_stay():
    program = program_of(lambda x, w: x @ w, torch.randn(5, 8), torch.randn(8, 3))
    after, record = run_pass(SplitLinear(), program)
    assert record.changes == 0 and after.text() == program.text()


def test_no_memory_is_added():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    _, record = run_pass(SplitLinear(), captured(model, torch.randn(128, 8)))
    assert record.peak_bytes_after == record.peak_bytes_before
