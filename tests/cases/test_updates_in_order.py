"""Buffers that copy each other or a parameter, backwards that read what forward overwrote, state seen late."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import UnsupportedError


class History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("cur", torch.zeros(3))
        self.register_buffer("prev", torch.zeros(3))
        self.register_buffer("target", torch.zeros(3, 3))
        self.register_buffer("row", torch.zeros(3))
        self.register_buffer("gate", torch.ones(3))

    def forward(self, x):
        y = self.lin(x) * self.gate.clone()
        with torch.no_grad():
            self.prev.copy_(self.cur)
            self.cur.copy_(x[0])
            self.target.copy_(self.lin.weight)
            self.row.copy_(self.lin.weight[0])
            self.gate.mul_(0.5).add_(1)
        return {"loss": y.square().mean()}


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_updates_see_values_from_before_any_write(with_optimizer):
    torch.manual_seed(0)
    model = History()
    twin = copy.deepcopy(model)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.SGD(lr=0.1) if with_optimizer else None)
    own = None if with_optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(2, 3)
        reference.zero_grad()
        twin(x)["loss"].backward()
        reference.step()
        if own is not None:
            own.zero_grad()
        out = step(x)
        if own is not None:
            out.loss.backward()
            own.step()
        for (name, value), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(value, expected), name


def test_batch_written_by_the_model_keeps_its_old_value_for_the_gradient():
    lin = nn.Linear(3, 1)
    twin = copy.deepcopy(lin)

    class Writes(nn.Module):
        def __init__(self, lin) -> None:
            super().__init__()
            self.lin = lin

        def forward(self, x):
            loss = self.lin(x.clone()).square().mean()
            x.add_(1)
            return {"loss": loss}

    x = torch.randn(4, 3)
    graphopt.compile(Writes(lin), outputs=["loss"])(x.clone()).loss.backward()
    Writes(twin)(x.clone())["loss"].backward()
    assert torch.equal(lin.weight.grad, twin.weight.grad)


def test_two_forwards_through_batch_norm_then_one_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    module = graphopt.compile(model)
    (module(a)["0"].mean() - module(b)["0"].square().mean()).backward()
    (twin(a).mean() - twin(b).square().mean()).backward()
    for parameter, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)


def test_gradient_into_an_output_beside_the_loss_is_refused():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            logits = self.lin(x)
            return {"loss": logits.square().mean(), "logits": logits}

    model = Both()
    out = graphopt.compile(model, outputs=["loss", "logits"])(torch.ones(1, 2))
    with pytest.raises(UnsupportedError, match="only the loss"):
        (out.loss + out.logits.sum()).backward()
    out = graphopt.compile(model, outputs=["loss", "logits"])(torch.ones(1, 2))
    (out.loss + out.logits.detach().sum()).backward()


def test_attributes_and_closures_changed_after_compiling_are_seen():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.drop = nn.Dropout(0.0)
            self.k = 1.0
            self.t = torch.tensor(1.0)

        def forward(self, x):
            return self.drop(self.lin(x)) * self.k * self.t

    model = Scaled()
    weight = 1.0
    module = graphopt.compile(model, loss=lambda out, batch: out.sum() * weight, outputs=["0", "loss"])
    x = torch.ones(1, 2)
    module(x)
    model.k = 10.0
    assert torch.equal(module(x)["0"], model(x))
    model.t.fill_(3.0)
    assert torch.equal(module(x)["0"], model(x))
    model.t = torch.tensor(7.0)
    assert torch.equal(module(x)["0"], model(x))
    weight = 4.0
    assert torch.equal(module(x).loss, model(x).sum() * 4.0)
    model.drop.p = 1.0
    assert torch.equal(module(x)["0"], torch.zeros(1, 2))


def test_attributes_set_on_the_compiled_module_are_the_models():
    model = nn.Dropout(0.5)
    module = graphopt.compile(model)
    module.p = 0.25
    assert model.p == 0.25
    model.eval()
    assert not module.training
    module.train()
    assert model.training


def test_random_factories_draw_as_in_eager_from_the_first_call():
    for function in (
        lambda x: x + torch.rand(4),
        lambda x: x + torch.randn(4),
        lambda x: x + torch.randint(0, 9, (4,)),
        lambda x: x + torch.empty(4).normal_(),
    ):
        x = torch.zeros(4)
        torch.manual_seed(3)
        expected, state = function(x), torch.get_rng_state()
        torch.manual_seed(3)
        assert torch.equal(graphopt.compile(function)(x)["0"], expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_threads_may_compile_at_once():
    failures = []

    def work(seed):
        try:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            step = graphopt.compile(
                model, outputs=["loss"], loss=lambda out, batch: out.square().mean(), optimizer=optim.SGD(lr=0.1)
            )
            for _ in range(3):
                step(torch.ones(2, 4))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
