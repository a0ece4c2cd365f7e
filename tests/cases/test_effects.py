"""C11 (in-place operators whose result is unused) and C12 (buffers that no output depends on)."""

from __future__ import annotations

import copy

import torch
from torch import nn

import graphopt


class StatementWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        y = x.clone()
        y.mul_(self.a)
        y[0] = 5
        y.clamp_(max=3)
        return {"loss": y.sum()}


def test_statement_only_writes_count():
    model = StatementWrites()
    out = graphopt.compile(model, outputs=["loss"])(torch.tensor([-2.0, 4.0]))
    out.loss.backward()
    assert out.loss == 5.0 and model.a.grad == 4.0


class SliceAndOutWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))

    def forward(self, x):
        y = torch.zeros(3)
        y[:] = x * self.a
        y[1:].add_(1)
        z = torch.empty(3)
        torch.mul(x, 2, out=z)
        y[0:1] += z[2:3]
        return {"loss": (y * y).sum()}


def test_slice_assignment_and_out_arguments_count():
    model, x = SliceAndOutWrites(), torch.tensor([1.0, -2.0, 4.0])
    twin = copy.deepcopy(model)
    expected = twin(x)["loss"]
    expected.backward()
    out = graphopt.compile(model, outputs=["loss"])(x)
    out.loss.backward()
    assert torch.equal(out.loss, expected) and torch.equal(model.a.grad, twin.a.grad)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x):
        self.steps += 1
        self.ema.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x


def test_buffer_updates_survive_without_an_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Counter())
    twin = copy.deepcopy(model)
    step = graphopt.compile(
        model, outputs=["loss"], loss=lambda out, batch: out.square().mean(), optimizer=graphopt.optim.SGD(lr=0.1)
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    buffers = dict(model.named_buffers())
    pointers = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    x = torch.randn(5, 4)
    for _ in range(3):
        step(x)
        reference.zero_grad()
        twin(x).square().mean().backward()
        reference.step()
    assert model[1].num_batches_tracked == 3 and model[2].steps == 3
    assert model[2].steps.dtype == torch.int64
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name] and buffer.data_ptr() == pointers[name]
        assert torch.equal(buffer, dict(twin.named_buffers())[name]), name
