"""C29 to C32, C34, C35: activation checkpointing by policies and by budgets."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import optim
from graphopt.checkpoint import EveryN, Manual, Policy, Segments, SqrtN
from graphopt.errors import BudgetError, UnsupportedError
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import saved_bytes
from graphopt.ir.twins import is_twin

EVERYTHING = Manual(lambda value: value.op not in ("aten.bernoulli.p", "aten.native_dropout.default"))
MODES: tuple[dict[str, Any], ...] = (
    {"checkpoint": EveryN(1)},
    {"checkpoint": SqrtN()},
    {"checkpoint": Segments(2)},
    {"checkpoint": EVERYTHING},
    {"memory": Fraction(19, 20)},
)
IDS = ("every-1", "sqrt-n", "segments-2", "everything", "budget")


def module_gradients(model: nn.Module, inputs: Sequence[torch.Tensor], *, seed: int = 0, **mode: Any) -> Any:
    """What a compiled module returns, the gradients of its inputs and parameters, and the generator behind it."""
    leaves = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
    module = graphopt.compile(model, **mode)
    torch.manual_seed(seed)
    result = module(*leaves)
    result["loss"].backward()
    gradients = [leaf.grad for leaf in leaves] + [parameter.grad for parameter in model.parameters()]
    return result, gradients, torch.get_rng_state(), module


def assert_same_gradients(left: Sequence[Any], right: Sequence[Any]) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


# ---- C29: dropout draws a different mask when it runs again ----------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES[:4], {"memory": Fraction(1)}], ids=[*IDS[:4], "budget-1"])
def test_gradient_belongs_to_the_mask_that_was_drawn(mode):
    class Dropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))

        def forward(self, x):
            y = self.layers[0](x)
            squares = y * y
            for layer in self.layers[1:]:
                squares = layer(squares).exp().log1p()
            return {"y": y, "loss": (y * y).sum(), "rest": squares.sum()}

    x = torch.ones(64, requires_grad=True)
    module = graphopt.compile(Dropout(), ["y", "loss"], **mode)
    result = module(x)
    result["loss"].backward()
    assert torch.equal(x.grad, 4 * result["y"].detach())
    assert 0 < int((result["y"] == 0).sum()) < 64


class Noisy(nn.Module):
    """Blocks with two dropouts, noise, and dropout inside attention."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 32), "down": nn.Linear(32, 8), "mix": nn.Linear(8, 24)})
            for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            q, k, v = layer["mix"](x).chunk(3, dim=-1)
            x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.1)[:, 0]
            hidden = F.dropout(F.gelu(layer["up"](x)), 0.1)
            x = x + F.dropout(layer["down"](hidden), 0.2) + 0.01 * torch.randn_like(x)
        return {"loss": x.square().mean()}


def noisy() -> tuple[Noisy, torch.Tensor]:
    """A model and its input, the same each time."""
    torch.manual_seed(0)
    return Noisy(), torch.randn(4, 16, 8)


@functools.cache
def noisy_gradients() -> Any:
    """What ``noisy`` gives without checkpoints."""
    model, x = noisy()
    return module_gradients(model, [x], seed=7)


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_one_seed_gives_one_result_with_and_without_checkpoints(mode):
    model, x = noisy()
    plain = noisy_gradients()
    checked = module_gradients(model, [x], seed=7, **mode)
    assert torch.equal(plain[0]["loss"], checked[0]["loss"])
    assert_same_gradients(plain[1], checked[1])
    assert torch.equal(plain[2], checked[2])
    if mode.get("checkpoint") is not None:
        assert any(is_twin(node) for node in checked[3].program.ops())


def test_the_generator_may_be_moved_between_forward_and_backward():
    model, x = noisy()
    expected = noisy_gradients()[1]
    leaf = x.clone().requires_grad_()
    module = graphopt.compile(model, checkpoint=EveryN(1))
    torch.manual_seed(7)
    loss = module(leaf)["loss"]
    torch.manual_seed(123)
    torch.rand(100)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_gradients(expected, [leaf.grad, *(parameter.grad for parameter in model.parameters())])


def trained(model: nn.Module, batches: Sequence[dict], *, optimizer: Any = None, **mode: Any) -> tuple[Any, list]:
    """The step after ``batches``, and the losses."""
    torch.manual_seed(3)
    step = graphopt.compile(model, ["loss"], optimizer=optimizer or optim.SGD(lr=0.1), **mode)
    return step, [step(**batch)["loss"].clone() for batch in batches]


def noisy_training(**mode: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and parameters of three steps of a small noisy model."""
    torch.manual_seed(0)
    model = Noisy(2)
    losses = trained(model, [{"x": torch.randn(4, 16, 8)} for _ in range(3)], **mode)[1]
    return losses, list(model.parameters())


plain_training = functools.cache(noisy_training)


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_steps_with_dropout_train_bit_equally(mode):
    for plain, checked in zip(plain_training(), noisy_training(**mode), strict=True):
        assert all(torch.equal(left, right) for left, right in zip(plain, checked, strict=True))


# ---- C30: statistics updated twice -----------------------------------------------------------------------------------


class Counting(nn.Module):
    """Batch norm, a counter of its own, and spectral norm, which advances a vector in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3 if n == 0 else 8, 8), nn.BatchNorm1d(8), nn.ReLU()) for n in range(2)
        )
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count.add_(1)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.last(x).square().mean()}


def counted(with_optimizer: bool, **mode: Any) -> Counting:
    """The model after three steps."""
    torch.manual_seed(0)
    model = Counting()
    batches = [torch.randn(4, 3) for _ in range(3)]
    if with_optimizer:
        trained(model, [{"x": x} for x in batches], **mode)
        return model
    module = graphopt.compile(model, ["loss"], **mode)
    for x in batches:
        module(x)["loss"].backward()
    return model


@functools.cache
def plainly_counted(with_optimizer: bool) -> Counting:
    """The model after three steps without checkpoints."""
    return counted(with_optimizer)


@pytest.mark.parametrize("mode", MODES, ids=IDS)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_statistics_advance_once_a_step(mode, with_optimizer):
    model, twin = counted(with_optimizer, **mode), plainly_counted(with_optimizer)
    assert model.count == 3 and model.layers[0][1].num_batches_tracked == 3
    for (name, left), right in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    assert_same_gradients([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


# ---- C31: frozen embeddings in front ---------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer beside a low-rank one: B starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return (self.frozen(x) + x @ self.a.t() @ self.b.t()).tanh()


class FrozenFront(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(8, 13).requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


@pytest.mark.parametrize("mode", MODES[:4], ids=IDS[:4])
def test_adapters_behind_frozen_embeddings_have_gradients(mode):
    torch.manual_seed(0)
    model, ids = FrozenFront(), torch.randint(0, 13, (2, 4))
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    expected = module_gradients(copy.deepcopy(model), [ids])[1]
    checked = module_gradients(model, [ids], **mode)[1]
    assert_same_gradients(expected, checked)
    assert all(layer.b.grad.abs().sum() > 0 for layer in model.layers)
    assert model.embedding.weight.grad is None and model.head.weight.grad is None
    for run, options in ((twin, {}), (model, mode)):
        run.zero_grad()
        trained(run, [{"ids": ids}] * 2, optimizer=optim.AdamW(lr=1e-2), **options)
    for (name, left), right in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    frozen = ("embedding.weight", "head.weight", "layers.0.frozen.weight")
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in frozen)
    assert not model.embedding.weight.requires_grad


# ---- C32: containers -------------------------------------------------------------------------------------------------


class Contained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, aux, *, scale):
        aux["n"] = aux.get("n", 0) + 1
        s, nothing, three = aux["list"]
        assert nothing is None and three == 3
        return {"h": (self.linear(x) * scale + aux["bias"] * s).tanh() / three, "aux": aux}


class Containers(nn.Module):
    """Three blocks that share one dict whose tensors all depend on one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(Contained() for _ in range(3))

    def forward(self, x):
        aux: dict[str, Any] = {"bias": self.root.sin(), "list": [self.root.cos(), None, 3]}
        scale = self.root.exp()
        for layer in self.layers:
            result = layer(x, aux, scale=scale)
            x, aux = result["h"], result["aux"]
        return {"loss": x.square().mean() * aux["n"], "n": torch.full((), aux["n"])}


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_tensors_in_containers_have_their_gradients(mode):
    torch.manual_seed(0)
    model, x = Containers(), torch.randn(16, 8)
    eager = copy.deepcopy(model)
    eager(x)["loss"].backward()
    plain = module_gradients(copy.deepcopy(model), [x])[1]
    result, checked, _, _ = module_gradients(model, [x], **mode)
    assert_same_gradients(plain, checked)
    assert result["n"] == 3
    assert torch.allclose(model.root.grad, eager.root.grad, rtol=0, atol=1e-6)


# ---- C34: segment arithmetic -----------------------------------------------------------------------------------------


def tower(count: int) -> nn.Module:
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.square().mean()}

    torch.manual_seed(0)
    return Tower()


def policies_for(count: int) -> list[Policy]:
    numbers = sorted({1, 2, 3, count, count + 1})
    return [SqrtN(), Segments(5), *(EveryN(n) for n in numbers)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, *(pytest.param(count, marks=pytest.mark.slow) for count in (9, 10))])
def test_every_layer_runs_again_at_most_once(count):
    x = torch.randn(256, 4)
    plain = module_gradients(tower(count), [x])
    for policy in policies_for(count):
        checked = module_gradients(tower(count), [x], checkpoint=policy)
        assert_same_gradients(plain[1], checked[1])
        again = [node.name for node in checked[3].program.ops() if is_twin(node)]
        assert len([name for name in again if name.startswith("tanh")]) <= count
        assert not [name for name in again if name.endswith("_again_1")]


@pytest.mark.parametrize("count", [9, 16])
def test_sqrt_saves_at_most_what_is_promised(count):
    x = torch.randn(256, 4)
    plain = saved_bytes(module_gradients(tower(count), [x])[3].program)
    checked = module_gradients(tower(count), [x], checkpoint=SqrtN())[3]
    assert saved_bytes(checked.program) <= 0.6 * plain


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
@pytest.mark.parametrize("policy", [EveryN, Segments])
def test_counts_below_one_are_refused(policy, number):
    with pytest.raises(UnsupportedError, match="whole number from 1"):
        policy(number)


# ---- C35: budgets ----------------------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8))

        def forward(self, x):
            turned = (x.t() @ x.view(-1, 32)).sum()
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.square().mean() + 0.0 * turned}

    torch.manual_seed(0)
    return Perceptron()


def test_budgets_hold_and_more_memory_never_costs_time():
    """Budgets from everything down to the smallest feasible one; the peak that is measured is within each."""
    x = torch.randn(512, 32)
    full = trained(perceptron(), [{"x": x}])[0].report(measure=True)
    whole = full.measured_peak_bytes + full.resident_bytes
    with pytest.raises(BudgetError) as caught:
        trained(perceptron(), [{"x": x}], memory=1)
    smallest = caught.value.smallest_bytes
    assert smallest < whole
    costs = []
    for n in range(6):
        budget = whole - (whole - smallest) * n // 5
        step, losses = trained(perceptron(), [{"x": x}] * 2, memory=budget)
        report = step.report(measure=True)
        assert report.measured_peak_bytes + report.resident_bytes <= budget
        assert report.measured_peak_bytes == report.predicted_peak_bytes
        rows = step.program.decisions.with_action(Action.RECOMPUTE)
        costs.append((sum(row.seconds for row in rows), losses))
    assert costs[0][0] == 0
    assert [seconds for seconds, _ in costs] == sorted(seconds for seconds, _ in costs)
    for _, losses in costs:
        assert all(torch.equal(left, right) for left, right in zip(losses, costs[0][1], strict=True))


def test_a_budget_of_nothing_is_refused_when_it_is_given():
    with pytest.raises(UnsupportedError, match="positive"):
        graphopt.compile(perceptron(), ["loss"], optimizer=optim.SGD(lr=0.1), memory=Fraction(0))
