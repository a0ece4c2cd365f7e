"""The Offload policy: alone, with others, within a host budget, and for a budget of the whole step."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import graphopt
from graphopt.checkpoint import EveryN, Offload, Policy
from graphopt.errors import UnsupportedError
from graphopt.ir.decisions import Action
from tests.support.models import tiny_model

KIB = 1024


@functools.cache
def model_and_batch():
    tiny = tiny_model("gpt2")
    return tiny.model, tiny.batch


def trained(**options):
    """The step after two updates, its last loss and the parameters."""
    model, batch = model_and_batch()
    model = copy.deepcopy(model)
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.AdamW(), backend="aten", **options)
    torch.manual_seed(1)
    loss = [step(**batch).loss for _ in range(2)][-1]
    return step, loss, [parameter.detach() for parameter in model.parameters()]


@functools.cache
def trained_plainly():
    """As ``trained``, with everything kept."""
    return trained()


def moved(step):
    return step.program.decisions.with_action(Action.OFFLOAD)


@pytest.mark.parametrize("policy", [Offload(), Offload(prefetch=1), EveryN(1) + Offload(), [EveryN(2), Offload()]])
def test_training_is_bit_equal_and_the_peak_is_as_predicted(policy):
    _, loss, parameters = trained_plainly()
    step, offloaded_loss, offloaded_parameters = trained(checkpoint=policy)
    assert torch.equal(loss, offloaded_loss)
    assert all(torch.equal(one, other) for one, other in zip(parameters, offloaded_parameters, strict=True))
    report = step.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_values_move_and_the_peak_falls():
    keep, _, _ = trained_plainly()
    step, _, _ = trained(checkpoint=Offload())
    assert len(moved(step)) > 4
    assert step.report().predicted_peak_bytes < keep.report().predicted_peak_bytes


def test_a_host_budget_is_not_exceeded_and_the_rest_stays():
    step, _, _ = trained(checkpoint=Offload(host_budget=f"{20 * KIB}"))
    assert 0 < sum(row.nbytes for row in moved(step)) <= 20 * KIB
    stays = step.program.decisions.with_action(Action.SAVE)
    assert any("host budget is used up" in row.reason for row in stays)


def test_for_a_budget_it_moves_what_makes_it_fit():
    keep, loss, _ = trained_plainly()
    budget = int(keep.report().memory.total * 0.9)
    step, planned_loss, _ = trained(checkpoint=Offload(), memory=budget)
    assert torch.equal(loss, planned_loss)
    assert moved(step) and step.report().memory.total <= budget


@pytest.mark.parametrize("wrong", [4, "sqrt", [], [EveryN(1), 3], (Offload(), "x")])
def test_what_is_no_policy_is_refused(wrong):
    with pytest.raises(UnsupportedError, match="checkpoint expects"):
        trained(checkpoint=wrong)


@pytest.mark.parametrize("make", [lambda: Offload(prefetch=0), lambda: Offload(host_budget="many"), lambda: EveryN(0)])
def test_options_of_policies_are_checked(make):
    with pytest.raises(UnsupportedError, match="expects"):
        make()


def test_two_offloads_contradict_each_other():
    with pytest.raises(UnsupportedError, match="contradict"):
        Offload() + Offload(prefetch=1)
    assert isinstance(EveryN(1) + Offload(), Policy)
