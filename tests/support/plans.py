"""Plans for tests: a program with its StepGraph, what a Choice makes of it, and choices drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from graphopt.ir.liveness import MemoryPlan, no_workspace, plan_memory
from graphopt.ir.program import Program
from graphopt.optim import SGD, Optimizer
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.recompute import Recompute
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline
from graphopt.planner.costs import call_seconds
from graphopt.planner.schedule import Choice
from graphopt.planner.simulate import Outcome, simulate
from graphopt.planner.step_graph import StepGraph, step_graph
from graphopt.planner.table import decision_table
from tests.support.steps import step_program


@dataclass(frozen=True)
class Planned:
    """A step before anything is decided, and its StepGraph."""

    program: Program
    graph: StepGraph


def planned_step(model: nn.Module, batch: Mapping[str, Any], *, optimizer: Optimizer | None = None) -> Planned:
    """The step of ``model`` (plain SGD unless given) as the memory passes get it."""
    program = step_program(model, batch, optimizer=optimizer or SGD(lr=0.1))
    return planned(Pipeline((Dedupe(), DropDead())).run(program))


def planned(program: Program) -> Planned:
    """``program`` and its StepGraph, with the costs of the default machine."""
    return Planned(program, step_graph(program, seconds=call_seconds(program), workspace=no_workspace))


def carried_out(step: Planned, outcome: Outcome) -> Program:
    """The program that ``outcome`` is about, rewritten and functional."""
    program = step.program.copy()
    program.decisions = decision_table(program, step.graph, outcome, policy="test")
    return Pipeline((Recompute(), DropDead())).run(program)


def executed_plan(step: Planned, outcome: Outcome) -> MemoryPlan:
    """The memory plan of the program that runs after ``outcome`` was carried out."""
    return plan_memory(Pipeline((ReuseLastUse(),)).run(carried_out(step, outcome)))


def random_outcome(graph: StepGraph, seed: int) -> Outcome:
    """An Outcome that drops each repeatable value with one probability and renews some of those dropped."""
    draw = random.Random(seed)
    share, renewing = draw.random(), draw.choice((0.0, 0.3, 1.0))
    dropped = {s for s in graph.early_storages() if graph.repeatable[graph.maker[s]] and draw.random() < share}
    renewed = {s for s in sorted(dropped) if draw.random() < renewing}
    late = [i for i in range(graph.first_late, graph.num_nodes) if graph.is_call[i]]
    phases = tuple(sorted(draw.sample(late, min(len(late), draw.randint(1, 5))))) if renewed else ()
    return simulate(graph, Choice(frozenset(dropped), frozenset(renewed), phases))
