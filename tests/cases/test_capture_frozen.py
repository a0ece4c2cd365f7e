"""C09: unused and frozen parameters get no gradient, no state, no decay."""

from __future__ import annotations

import copy

import torch
from torch import nn

import graphopt


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return {"loss": self.frozen(self.used(x)).square().mean()}


def test_unused_and_frozen_weights_stay_bit_identical():
    torch.manual_seed(0)
    model = ThreeLayers()
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.AdamW(lr=0.1, weight_decay=0.1))
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.randn(5, 4)

    def eager_step() -> None:
        reference.zero_grad()
        twin(x)["loss"].backward()
        reference.step()

    for _ in range(3):
        step(x)
        eager_step()
    for name in ("unused.weight", "unused.bias", "frozen.weight", "frozen.bias"):
        assert torch.equal(model.state_dict()[name], before[name]), name
    assert set(step.optimizer.state) == {model.used.weight, model.used.bias}
    assert not model.frozen.weight.requires_grad and model.unused.weight.requires_grad
    model.frozen.requires_grad_(True)
    twin.frozen.requires_grad_(True)
    step(x)
    eager_step()
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_module_form_leaves_gradient_of_unused_at_none():
    model = ThreeLayers()
    graphopt.compile(model, outputs=["loss"])(torch.randn(5, 4)).loss.backward()
    assert model.unused.weight.grad is None and model.frozen.weight.grad is None
    assert model.used.weight.grad is not None
