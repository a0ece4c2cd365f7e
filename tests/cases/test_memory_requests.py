"""Budgets and policies where the program is no whole step, or the request is odd."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import optim
from graphopt.checkpoint import Manual, SqrtN
from graphopt.errors import UnsupportedError
from graphopt.ir.units import parse_bytes


class Net(nn.Module):
    """Four layers with dropout, wide against their batch of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def compiled(**options):
    torch.manual_seed(0)
    optimizer = optim.SGD(lr=0.1, momentum=0.9)
    return graphopt.compile(Net(), ["loss"], optimizer=optimizer, backend="aten", **options)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["step", "window"])
def test_a_fraction_is_no_budget_of_evaluations_and_window_updates(options):
    batch = {"x": torch.randn(64, 8)}
    plain, limited = compiled(**options), compiled(memory=Fraction(9, 10), **options)
    for step in (plain, limited):
        torch.manual_seed(1)
        step(**batch)
        step(**batch)
    for mine, its in zip(plain.model.parameters(), limited.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(plain.eval(**batch).loss, limited.eval(**batch).loss)


def test_names_that_only_the_training_graph_has_do_not_stop_an_evaluation():
    step = compiled(checkpoint=Manual(["layers.0.2"]), accumulate=2)
    x = torch.randn(64, 8)
    step(x)
    step(x)
    assert step.eval(x).loss.isfinite()


def test_a_budget_holds_with_passes_of_ones_own_and_accumulation():
    x = torch.randn(64, 8)
    whole = compiled(accumulate=3)
    whole(x)
    state_bytes = sum(parameter.nbytes for parameter in whole.model.parameters())
    budget = int(0.9 * (whole.report().memory.total + state_bytes))
    peaks = []
    for passes in (None, "dedupe"):
        step = compiled(accumulate=3, memory=budget, passes=passes)
        step(x)
        peaks.append(step.report().predicted_peak_bytes)
    assert peaks[0] == peaks[1]


def test_a_predicate_that_raises_is_the_users_own_error():
    step = compiled(checkpoint=Manual(lambda facts: facts.no_such_thing))
    with pytest.raises(UnsupportedError, match=r"predicate of Manual expects one ValueFacts.*no_such_thing"):
        step(torch.randn(64, 8))


def test_odd_requests_say_what_was_expected():
    for which in (None, 5, b"layers"):
        with pytest.raises(UnsupportedError, match="Manual expects a list of module paths"):
            Manual(which)
    assert Manual(name for name in ["a"]) == Manual(["a"])
    for other in (None, 3, [SqrtN()]):
        with pytest.raises(TypeError, match="unsupported operand"):
            SqrtN() + other


def test_bytes_are_exact_and_at_least_one():
    assert parse_bytes("9007199254740993") == 2**53 + 1
    assert parse_bytes("1.1 kB") == 1100
    assert parse_bytes("9" * 400) == 10**400 - 1
    with pytest.raises(UnsupportedError, match="expects bytes"):
        parse_bytes("0.1B")


class Masked(nn.Module):
    """A boolean mask over a number, with that moment at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 256)

    def forward(self, x):
        scale = (x > 0.2) / 0.8
        return {"loss": self.layer(x[:4] * scale[:4]).square().mean()}


def test_what_operators_on_numbers_convert_is_in_the_plan():
    step = graphopt.compile(Masked(), ["loss"], optimizer=optim.SGD(lr=0.1), backend="aten")
    step(torch.randn(4096, 8))
    report = step.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_forms_that_copy_are_not_writes_in_place():
    class Cloned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x):
            hidden = 1 - self.first(x).exp().clone()
            return {"loss": self.second(F.relu(hidden)).square().mean()}

    step = graphopt.compile(Cloned(), ["loss"], optimizer=optim.SGD(lr=0.1), backend="aten")
    x = torch.randn(64, 8)
    step(x)
    for run in (step, step.eval):
        run(x)
        report = step.report(measure=True)
        assert report.measured_peak_bytes == report.predicted_peak_bytes
        assert "clone.out" not in step.source and "Scalar_out" not in step.source


class Tracked(nn.Module):
    """Instance normalisation updates copies of its statistics in place, in the middle of the forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x):
        return {"loss": self.norm(self.layer(x)).exp().square().mean()}


def test_what_is_written_in_place_does_not_run_again():
    x = torch.randn(2, 4, 8)
    models = []
    for options in ({}, {"checkpoint": Manual(lambda facts: True)}):
        torch.manual_seed(0)
        models.append(Tracked())
        step = graphopt.compile(models[-1], ["loss"], optimizer=optim.SGD(lr=0.1), backend="aten", **options)
        step(x)
        step(x)
    assert models[0].norm.running_mean.abs().max() > 0
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name


def test_a_parameter_changed_before_backward_is_noticed_where_its_layer_runs_again():
    x = torch.randn(64, 8)
    module = graphopt.compile(Net(), ["loss"], backend="aten", checkpoint=Manual(lambda facts: True))
    loss = module(x)["loss"]
    with torch.no_grad():
        module.get_parameter("layers.0.0.weight").mul_(2)  # eager does not read it in backward, a second run does
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
