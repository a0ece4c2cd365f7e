"""Evaluation beside training in FP8: it computes what training does, and may run less of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.fp8 import Delayed, Tensorwise
from graphopt.operators.fp8 import MATMUL
from graphopt.planner.fp8_measured import MeasuredProduct, MeasuredTable, write_table
from graphopt.planner.machine_rates import CACHE_VARIABLE


class Auxiliary(nn.Module):
    """A layer, and numbered ones with a loss that training alone computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.aux = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x, target):
        hidden = self.body(x)
        loss = (hidden - target).square().mean()
        if self.training:
            loss = loss + sum((layer(hidden) - target).square().mean() for layer in self.aux)
        return {"loss": loss}


def num_products(program):
    return sum(node.target is MATMUL for node in program.ops())


def test_options_that_name_what_training_alone_runs_are_no_mistake_in_evaluation():
    module = graphopt.compile(
        Auxiliary(), ["loss"], precision=Tensorwise(exclude=("aux.0",), skip_last=1), backend="aten"
    )
    batch = {"x": torch.randn(16, 32), "target": torch.randn(16, 32)}
    module(**batch).loss.backward()
    assert {row.module for row in module.program.fp8.eligible} == {"body"}
    module.eval()
    with torch.no_grad():
        module(**batch)
    assert [row.module for row in module.program.fp8.rows] == ["body"] and num_products(module.program) == 1


class Layers(nn.Module):
    """Two layers whose loss makes neither a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, target):
        return {"loss": (self.second(self.first(x).tanh()) - target).square().mean()}


class Written(nn.Module):
    """Products with a weight in several ways to write one, of inputs that lie in several orders."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 32)
        self.weights = nn.ParameterList(torch.randn(32, 32) / 8 for _ in range(3))

    def forward(self, x):
        batched, turned, rows = self.weights
        hidden = torch.tanh(self.layer(x.transpose(0, 1)) @ batched).transpose(0, 1)
        hidden = torch.tanh(torch.matmul(hidden, turned.t()))
        return {"loss": (hidden[0] @ rows).square().mean()}


def forward_products(program):
    rows = [row for row in program.fp8.rows if row.role == "forward"]
    return [(row.module, row.weights, row.shape, row.is_fp8) for row in rows]


@pytest.mark.parametrize("recipe", [Delayed(include=("*",), history=4), Tensorwise(include=("*",))], ids=str)
def test_a_product_is_that_of_training_however_it_is_written(recipe):
    optimizer = graphopt.optim.SGD(lr=0.1)
    step = graphopt.compile(Written(), ["loss"], optimizer=optimizer, precision=recipe, backend="aten")
    x = torch.randn(16, 16, 32)
    early = step.eval(x=x).loss
    in_evaluation = forward_products(step.program)
    assert torch.equal(early, step(x=x).loss) and torch.equal(step.eval(x=x).loss, step(x=x).loss)
    assert in_evaluation == forward_products(step.program)
    assert [is_fp8 for *_, is_fp8 in in_evaluation] == [True] * 4


BATCH = {"x": torch.randn(64, 64), "target": torch.randn(64, 64)}


@pytest.fixture
def costly_quantization(tmp_path, monkeypatch):
    """The forward product of a layer alone does not pay for what it quantizes, its three products do."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    write_table(MeasuredTable("H100", True, 1e15, 1.5e-4, (MeasuredProduct(64, 64, 64, 1e-3, 5e-4, 5e-4, 5e-4),)))


def test_evaluation_takes_the_products_of_training_where_costs_decide(costly_quantization):
    optimizer = graphopt.optim.SGD(lr=0.0)
    step, alone = (
        graphopt.compile(Layers(), ["loss"], optimizer=optimizer, precision=Tensorwise(target="H100"), backend="aten")
        for _ in range(2)
    )
    trained = step(**BATCH).loss
    assert torch.equal(step.eval(**BATCH).loss, trained)
    assert not torch.equal(alone.eval(**BATCH).loss, trained)
    alone(**BATCH)
    assert torch.equal(alone.eval(**BATCH).loss, trained)  # what was compiled before any training is not used again


def test_a_module_evaluated_before_training_takes_its_products_too(costly_quantization):
    module = graphopt.compile(Layers(), ["loss"], precision=Tensorwise(target="H100"), backend="aten")
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(module(**BATCH).loss)
        trained = module(**BATCH).loss.detach()
    assert not torch.equal(losses[0], trained) and torch.equal(losses[1], trained)


# ---- after more training ---------------------------------------------------------------------------------------------


@pytest.fixture
def few_rows_pay(tmp_path, monkeypatch):
    """FP8 pays at 64 rows, and does not at 512."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    products = (MeasuredProduct(64, 64, 64, 1e-3, *[1e-4] * 3), MeasuredProduct(512, 64, 64, 1e-3, *[1e-2] * 3))
    write_table(MeasuredTable("H100", True, 1e15, 1e-6, products))


def forwards_in_fp8(step):
    return [is_fp8 for *_, is_fp8 in forward_products(step.program)]


def rows_of(num_rows):
    return {name: torch.randn(num_rows, 64) for name in ("x", "target")}


def test_evaluation_is_compiled_again_where_training_decides_otherwise_at_its_sizes(few_rows_pay):
    few, many = rows_of(64), rows_of(512)
    optimizer = graphopt.optim.SGD(lr=0.0)
    step = graphopt.compile(
        Layers(), ["loss"], optimizer=optimizer, precision=Tensorwise(target="H100"), backend="aten"
    )
    step(**few)
    in_fp8 = step.eval(**many).loss  # as training has it at the size that was compiled last
    trained = step(**many).loss
    assert not any(forwards_in_fp8(step)) and not torch.equal(in_fp8, trained)
    assert torch.equal(step.eval(**many).loss, trained)
    assert torch.equal(step.eval(**few).loss, step(**few).loss) and all(forwards_in_fp8(step))
    assert len(step.evaluations.built) == 2, "what is stale keeps no place"


def test_a_module_without_gradients_is_compiled_again_too(few_rows_pay):
    few, many = rows_of(64), rows_of(512)
    module = graphopt.compile(Layers(), ["loss"], precision=Tensorwise(target="H100"), backend="aten")
    module(**few)
    with torch.no_grad():
        module(**many)
    trained = module(**many).loss.detach()
    with torch.no_grad():
        assert torch.equal(module(**many).loss, trained) and num_products(module.program) == 0


@pytest.mark.parametrize("target", [None, "H100"])
def test_an_evaluation_that_training_agrees_with_is_compiled_once(target, few_rows_pay):
    few, many = rows_of(64), rows_of(512)
    recipe = Tensorwise(include=("first",), target=target)
    step = graphopt.compile(Layers(), ["loss"], optimizer=graphopt.optim.SGD(lr=0.0), precision=recipe, backend="aten")
    for batch in (few, many, few):
        step.eval(**few)
        step(**batch)
    assert step.evaluations.compiled == 1


def test_a_refused_product_is_no_reason_to_compile_evaluation_at_every_call():
    step = graphopt.compile(
        Layers(), ["loss"], optimizer=graphopt.optim.SGD(lr=0.0), precision=Tensorwise(), backend="aten"
    )
    empty, full = rows_of(0), rows_of(64)
    step.eval(**empty)
    step(**full)
    for _ in range(2):
        step.eval(**empty)
    assert step.evaluations.compiled == 2  # before training and after it
