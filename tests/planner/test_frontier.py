"""Budgets hold, more memory never costs time, every process finds the same plans, and planning is fast."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.plan_graphs import PlanGraph, chain, encoder_decoder, transformer, u_net
from graphopt.ir.liveness import no_workspace
from graphopt.planner.decide import MemoryRequest, decide
from graphopt.planner.frontier import Frontier, search_frontier
from graphopt.planner.schedule import KEEP_ALL
from graphopt.planner.simulate import simulate
from tests.support.models import tiny_model
from tests.support.plans import executed_plan, planned_step

ROOT = Path(__file__).resolve().parents[2]
# Large enough that the chain of segments plans them, not the search of single cuts.
LARGE = (transformer(16), chain(120, seed=3), encoder_decoder(30))


def budgets(graph: PlanGraph, frontier: Frontier, count: int = 20) -> list[int]:
    top, low = simulate(graph.step_graph(), KEEP_ALL).peak_bytes, frontier.smallest_peak
    return [low + (top - low) * n // (count - 1) for n in range(count)]


@pytest.mark.parametrize("graph", [u_net(4), *LARGE], ids=lambda graph: graph.name)
def test_twenty_budgets_none_exceeded_and_no_step_back(graph):
    step = graph.step_graph()
    frontier = search_frontier(step)
    plans = [frontier.best(limit) for limit in budgets(graph, frontier)]
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0
    for limit, plan in zip(budgets(graph, frontier), plans, strict=True):
        assert simulate(step, plan.choice).peak_bytes == plan.peak_bytes <= limit
    assert frontier.best(frontier.smallest_peak - 1) is None


def test_the_chain_of_segments_finds_much_on_large_graphs():
    """Half of the range of peaks for at most half of the forward part's time again, as first-k checkpointing has it."""
    for graph in LARGE[:2]:
        frontier = search_frontier(graph.step_graph())
        top = simulate(graph.step_graph(), KEEP_ALL).peak_bytes
        best = frontier.best((top + frontier.smallest_peak) // 2)
        assert best is not None and best.seconds <= 0.5e-6 * sum(graph.micros[: graph.first_late])


def test_plans_run_as_planned():
    tiny = tiny_model("mlp")
    step = planned_step(tiny.model, tiny.batch)
    for outcome in search_frontier(step.graph).outcomes:
        assert executed_plan(step, outcome).peak_bytes == outcome.peak_bytes


_PRINT_PLAN = """
from benchmarks.plan_graphs import transformer, u_net
from graphopt.planner.frontier import search_frontier
for graph in (u_net(3), transformer(14)):
    for found in search_frontier(graph.step_graph()).outcomes:
        choice = found.choice
        print(found.peak_bytes, found.seconds, sorted(choice.dropped), sorted(choice.renewed), choice.cuts)
"""


def test_every_process_finds_the_same_plans():
    texts = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_PLAN],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1] and len(texts[0].splitlines()) > 10


def _seconds_to_plan(graph: PlanGraph) -> float:
    step, started = graph.step_graph(), time.process_time()
    assert len(search_frontier(step).outcomes) > 5
    return time.process_time() - started


@pytest.mark.slow
def test_planning_is_fast_and_near_linear():
    """7 nodes a layer forward and as many backward; a step with its update has as many again, which are not planned."""
    small, large = _seconds_to_plan(transformer(143)), _seconds_to_plan(transformer(1430))
    assert small < 5 and large < 60
    assert large < 20 * small


def test_decisions_are_the_same_twice():
    tiny = tiny_model("mlp")
    step = planned_step(tiny.model, tiny.batch)
    request = MemoryRequest(budget=step.graph.resident_bytes + search_frontier(step.graph).smallest_peak)
    first, second = (decide(step.program, request, no_workspace) for _ in range(2))
    assert first == second
