"""decide-memory: what the table says, for policies and budgets; the program itself stays as it is."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.checkpoint import EveryN, Manual, SqrtN
from graphopt.errors import BudgetError, UnsupportedError
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program
from graphopt.passes.decide_memory import DecideMemory
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.recompute import Recompute
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import run_pass
from tests.support.steps import step_program


class Net(nn.Module):
    """Six layers, dropout in each, wide against its batch of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(layer(x), 0.1)
        return {"loss": x.square().mean()}


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return Pipeline((DropDead(),)).run(step_program(Net(), {"x": torch.randn(64, 8)}))


def whole_bytes(program: Program) -> int:
    """Peak and resting bytes of what runs."""
    plan = plan_memory(Pipeline((DropDead(), ReuseLastUse())).run(program))
    return plan.peak_bytes + plan.resident_bytes


def test_changes_the_table_alone(program):
    after, record = run_pass(DecideMemory(policy=EveryN(2)), program)
    assert record.changes == 0 and after.text() == program.text()
    assert program.decisions.rows == () and after.decisions.policy == "EveryN(n=2)"


def test_does_nothing_when_nothing_is_asked_for(program):
    after, _ = run_pass(DecideMemory(), program)
    assert after.decisions == program.decisions


def test_every_value_that_the_backward_reads_has_a_row(program):
    after, _ = run_pass(DecideMemory(policy=EveryN(1)), program)
    rows = {row.value: row for row in after.decisions.rows}
    again = [row for row in rows.values() if row.action is Action.RECOMPUTE]
    assert any(row.value.startswith("gelu") for row in again)
    assert all(row.copies == 1 and row.seconds > 0 and row.nbytes > 0 for row in again)
    assert all(row.source and row.reason for row in rows.values())


def test_a_draw_is_saved_and_says_why(program):
    after, _ = run_pass(DecideMemory(policy=Manual(["layers.*"])), program)
    drawn = [row for row in after.decisions.rows if "random draw" in row.reason]
    assert drawn and all(row.action is Action.SAVE and row.copies == 0 for row in drawn)


def test_a_value_with_users_in_several_layers_has_one_row(program):
    after, _ = run_pass(DecideMemory(policy=SqrtN()), program)
    values = [row.value for row in after.decisions.rows]
    assert len(values) == len(set(values))


def test_the_decided_peak_is_that_of_what_runs(program):
    smallest = None
    for share in (0.9, 0.8, 0.7):
        budget = int(share * whole_bytes(program))
        decided, _ = run_pass(DecideMemory(budget=budget), program)
        after = Pipeline((Recompute(),)).run(decided)
        assert whole_bytes(after) <= budget
        smallest = decided.decisions.notes[-1]
    assert smallest is not None and "smallest feasible budget" in smallest


def test_a_budget_that_all_fits_into_drops_nothing(program):
    after, _ = run_pass(DecideMemory(budget=whole_bytes(program)), program)
    assert after.decisions.with_action(Action.RECOMPUTE) == ()
    assert "without dropping anything" in after.decisions.notes[-1]


def test_a_fraction_is_of_the_whole_step(program):
    after, _ = run_pass(DecideMemory(budget=Fraction(1)), program)
    assert after.decisions.with_action(Action.RECOMPUTE) == ()
    half, _ = run_pass(DecideMemory(budget=Fraction(4, 5)), program)
    assert whole_bytes(Pipeline((Recompute(),)).run(half)) <= 0.8 * whole_bytes(program)


def test_reserved_bytes_count_against_the_budget(program):
    budget = int(0.9 * whole_bytes(program))
    reserved = int(0.15 * whole_bytes(program))
    after, _ = run_pass(DecideMemory(budget=budget, reserved_bytes=reserved), program)
    assert whole_bytes(Pipeline((Recompute(),)).run(after)) + reserved <= budget


def test_an_impossible_budget_names_a_feasible_one(program):
    with pytest.raises(BudgetError, match="largest values are") as caught:
        Pipeline((DecideMemory(budget=1000),)).run(program)
    smallest = caught.value.smallest_bytes
    after, _ = run_pass(DecideMemory(budget=smallest), program)
    assert whole_bytes(Pipeline((Recompute(),)).run(after)) <= smallest
    with pytest.raises(BudgetError):
        Pipeline((DecideMemory(budget=smallest - 1),)).run(program)


def test_a_policy_that_exceeds_the_budget_is_told_so(program):
    with pytest.raises(BudgetError, match="leave checkpoint out"):
        Pipeline((DecideMemory(policy=Manual(["layers.0"]), budget=Fraction(7, 10)),)).run(program)


def test_refuses_a_program_that_was_rewritten(program):
    after = Pipeline((DecideMemory(policy=EveryN(1)), Recompute(), DropDead())).run(program)
    again, record = run_pass(DecideMemory(budget=1000), after)
    assert again.decisions == after.decisions
    assert "decide before" in record.refusals[0].reason


def test_a_policy_that_matches_nothing_says_what_there_is(program):
    with pytest.raises(UnsupportedError, match=r"no module path matches 'blocks'.*layers\.0"):
        Pipeline((DecideMemory(policy=Manual(["blocks"])),)).run(program)


def test_workspace_of_operators_counts():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 8)
    step = graphopt.compile(model, ["loss"], optimizer=graphopt.optim.SGD(lr=0.1), memory=Fraction(4, 5))
    step(x=x)
    report = step.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_a_budget_can_be_given_as_text_and_as_a_number():
    (sized,) = Pipeline.parse("decide-memory{budget=100KiB}")
    (counted,) = Pipeline.parse("decide-memory{budget=4096}")
    assert (sized.budget, counted.budget) == ("100KiB", 4096)
