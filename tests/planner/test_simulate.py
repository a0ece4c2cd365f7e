"""The simulator says of a choice what the plan of the program says that is rewritten for it, to the byte."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import graphopt
from graphopt.planner.schedule import KEEP_ALL, Choice, schedule
from graphopt.planner.simulate import simulate
from graphopt.planner.table import choice_of, decision_table
from tests.support.models import tiny_model
from tests.support.plans import Planned, carried_out, executed_plan, planned_step, random_outcome

MODELS = ("mlp", "cnn", "resnet", "transformer-dropout", "gpt2")


@functools.cache
def step_of(name: str) -> Planned:
    tiny = tiny_model(name)
    return planned_step(tiny.model, tiny.batch)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_peak_is_that_of_the_rewritten_program(name, seed):
    step = step_of(name)
    outcome = random_outcome(step.graph, seed)
    plan = executed_plan(step, outcome)
    assert plan.peak_bytes == outcome.peak_bytes
    calls = [k for k, i in enumerate(outcome.order.node) if step.graph.is_call[i]]
    assert [outcome.live[k] for k in calls] == list(plan.live_bytes)


def test_keeping_everything_is_the_program_as_it_is():
    step = step_of("gpt2")
    assert executed_plan(step, simulate(step.graph, KEEP_ALL)).peak_bytes == simulate(step.graph, KEEP_ALL).peak_bytes


@pytest.mark.parametrize("seed", range(4))
def test_a_table_stands_for_the_choice_it_was_made_of(seed):
    step = step_of("transformer-dropout")
    outcome = random_outcome(step.graph, seed)
    table = decision_table(step.program, step.graph, outcome, policy="test")
    again = simulate(step.graph, choice_of(step.graph, table))
    assert (again.peak_bytes, list(again.order.node)) == (outcome.peak_bytes, list(outcome.order.node))


def test_a_cut_lets_the_late_calls_before_it_read_the_first_run():
    step = step_of("mlp")
    graph = step.graph
    s = next(s for s in graph.early_storages() if graph.nodes[graph.value[s]].name == "gelu")
    late = [i for i in range(graph.first_late, graph.num_nodes) if graph.is_call[i]]
    reads = [i for i in late if any(s in graph.held[a] for a in graph.arguments[i])]
    order = schedule(graph, Choice(frozenset({s}), cuts=((s, (reads[-1] + 1,)),)))
    assert not any(order.is_twin)
    order = schedule(graph, Choice(frozenset({s}), cuts=((s, (reads[-1],)),)))
    assert [order.anchor[k] for k, twin in enumerate(order.is_twin) if twin] == [reads[-1]] * sum(order.is_twin)
    assert any(order.is_twin)


def test_copies_of_guarded_buffers_are_counted():
    """A module writes its buffers before its backward runs: what runs again reads copies, part of the peak."""
    torch.manual_seed(0)
    network = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())))
    module = graphopt.compile(network, checkpoint=graphopt.checkpoint.EveryN(1))
    next(iter(module(torch.randn(64, 8)).values())).sum().backward()
    report = module.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    assert any(node.name.startswith("clone") for node in module.program.ops())


def test_the_program_carries_what_was_decided():
    step = step_of("mlp")
    outcome = random_outcome(step.graph, 0)
    assert carried_out(step, outcome).decisions.policy == "test"
