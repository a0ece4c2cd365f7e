"""Steps with a scaled loss for tests, and everything that a skipped update must leave as it was."""

from __future__ import annotations

import copy

import torch
from torch import nn

import graphopt
from tests.support.saving import comparable, same_tree


def compiled(model, *, outputs=("loss",), backend="aten", **options):
    return graphopt.compile(model, outputs=list(outputs), backend=backend, **options)


class Regression(nn.Module):
    """Linear(2, 1) with a mean square loss, computed in ``compute``."""

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.compute = compute

    def forward(self, x, y):
        weight, bias = self.linear.weight.to(self.compute), self.linear.bias.to(self.compute)
        # Small, so that 65536 times its gradient is still a float16.
        return {"loss": (nn.functional.linear(x.to(self.compute), weight, bias).float() - y).square().mean() / 64}


def regression_batches(count=5, *, bad=()):
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 2, generator=generator), "y": torch.randn(4, 1)} for _ in range(count)]
    for position in bad:
        batches[position]["x"][0, 0] = float("inf")
    return batches


def everything(step):
    """Parameters and optimizer state, copied."""
    state = {
        f"{name}.{key}": value for name, values in step.state_dict()["state"].items() for key, value in values.items()
    }
    return copy.deepcopy({**dict(step.model.named_parameters()), **state})


def same(first, second):
    return same_tree(_plain(first), _plain(second))


def _plain(values):
    return comparable(
        {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    )
