"""What forward does to its modules in Python: rebound buffers are written, other changes refused, all is restored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import CaptureError


class WithForward(nn.Module):
    """A linear layer, two buffers, a count and a list; ``body`` is the rest of its forward."""

    def __init__(self, body) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.register_buffer("g", torch.ones(3))
        self.register_buffer("h", torch.full((3,), 2.0))
        self.register_buffer("wide", torch.zeros(2, 3))
        self.count = 0
        self.kept = []
        self.body = body

    def forward(self, x):
        return {"loss": self.body(self, self.a(x)).sum()}


def make(body):
    torch.manual_seed(0)
    return WithForward(body), torch.randn(2, 3)


def assert_two_steps_match(body):
    model, x = make(body)
    twin = copy.deepcopy(model)
    step = graphopt.compile(model, outputs=["loss"])
    for _ in range(2):
        expected, out = twin(x)["loss"], step(x)
        expected.backward()
        out.loss.backward()
        assert torch.equal(out.loss, expected)
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert torch.equal(model.a.weight.grad, twin.a.weight.grad)


def rebind(self, y):
    self.g = self.g * 0.5 + 1
    return y * self.g


def swap(self, y):
    self.g, self.h = self.h, self.g
    return y * self.g


def broadcast_copy(self, y):
    self.wide.copy_(y[0].detach())
    return y + self.wide


def cast_copy(self, y):
    self.wide.copy_(y.detach().double())
    return y + self.wide


def write_under_no_grad(self, y):
    with torch.no_grad():
        self.g.mul_(0.9).add_(y.mean(0))
        fresh = y * 2
        fresh.add_(1)
    return y * self.g + fresh


def write_into_detached_alone(self, y):
    weights = y.softmax(-1).detach()
    weights.mul_(2)
    return y * weights


def fill_mask_under_no_grad(self, y):
    mask = torch.zeros_like(y)
    with torch.no_grad():
        mask.masked_fill_(y > 0, 2)
    return y * mask


def carry_on_after_detach(self, y):
    g = y * 2
    t = g.detach()
    g.mul_(2)
    return g * t


BODIES = [
    fill_mask_under_no_grad,
    carry_on_after_detach,
    rebind,
    swap,
    broadcast_copy,
    cast_copy,
    write_under_no_grad,
    write_into_detached_alone,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_writes_match_eager(body):
    assert_two_steps_match(body)


def reshape_buffer(self, y):
    self.g = self.g[:2]
    return y


def count_calls(self, y):
    self.count += 1
    return y * self.count


def keep_tensor(self, y):
    self.last = y
    return y


def grow_list(self, y):
    self.kept.append(y)
    return y


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (reshape_buffer, r"self\.g\.copy_"),
        (count_calls, "'count'"),
        (keep_tensor, "'last'"),
        (grow_list, "'kept'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_attributes_are_refused_and_restored(body, message):
    model, x = make(body)
    buffer = model.g
    with pytest.raises(CaptureError, match=message):
        graphopt.compile(model, outputs=["loss"])(x)
    assert model.count == 0 and model.kept == [] and not hasattr(model, "last") and model.g is buffer


def test_an_attribute_that_ends_up_equal_is_fine():
    def scratch(self, y):
        self.count += 1
        self.kept.append(y)
        result = self.kept.pop() * self.count
        self.count -= 1
        return result

    assert_two_steps_match(scratch)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_weights_that_torchs_own_hooks_compute_are_fine(norm):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(norm(nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    assert torch.equal(graphopt.compile(models[0])(x)["0"], models[1](x))


def test_a_returned_old_value_of_a_rebound_buffer_stays_old():
    class ReturnsOld(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("g", torch.zeros(2))

        def forward(self, x):
            old = self.g
            self.g = self.g + 1
            return {"old": old, "y": x * self.g}

    model = ReturnsOld()
    out = graphopt.compile(model)(torch.ones(2))
    assert out.old.tolist() == [0, 0] and out.y.tolist() == [1, 1] and model.g.tolist() == [1, 1]
