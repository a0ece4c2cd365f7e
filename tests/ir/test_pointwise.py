"""What is pointwise, beside every torch: some versions do not tag it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from graphopt.ir import ops
from tests.support.graphs import program_of


@pytest.mark.parametrize("function", [functional.leaky_relu, torch.relu, torch.sigmoid, functional.silu])
def test_activations_are_pointwise(function):
    (call,) = program_of(function, torch.randn(4)).ops()
    assert ops.is_pointwise(call)
