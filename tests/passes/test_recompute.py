"""recompute: what runs again and where, what never does, and that not one bit changes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.capture.trace import trace_function
from graphopt.checkpoint import EveryN, Manual
from graphopt.errors import BudgetError, PassError
from graphopt.ir import ops
from graphopt.ir.decisions import Action, Decision, DecisionTable
from graphopt.ir.liveness import plan_memory, saved_for_backward
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import InputKind, Signature
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.recompute import Recompute
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline, Verify
from tests.support.graphs import run_pass, targets
from tests.support.models import tiny_model
from tests.support.plans import Planned, planned_step, random_outcome
from tests.support.steps import step_program

aten = torch.ops.aten


def two_part_program(function: Callable, *inputs: torch.Tensor) -> Program:
    """The program of ``function``; what depends on its last argument is the backward part."""
    program = trace_function(function, *inputs, stage=Stage.STEP)
    *others, last = program.signature.inputs
    program.signature = Signature((*others, replace(last, kind=InputKind.TANGENT)), program.signature.outputs)
    return program


def marked(program: Program, *names: str, copies: int = 1, phases: tuple[str, ...] = ()) -> Program:
    """``program`` whose table says that the values called ``names`` are computed again."""
    rows = tuple(Decision(name, Action.RECOMPUTE, 0, 0.0, "by hand", copies=copies) for name in names)
    program.decisions = DecisionTable("by hand", rows, phases)
    return program


def names(program: Program) -> list[str]:
    return [node.name for node in program.ops()]


def gelu_step(x, w, tangent):
    hidden = x @ w
    active = F.gelu(hidden)
    total = active.sum()
    late = tangent.neg()
    return total, (late * active).t() @ x, late * hidden


def gelu_program() -> Program:
    return two_part_program(gelu_step, torch.randn(8, 4), torch.randn(4, 16), torch.randn(8, 16))


def test_runs_again_right_before_the_first_late_use():
    after, record = run_pass(Recompute(), marked(gelu_program(), "gelu"))
    assert names(after) == ["mm", "gelu", "sum_1", "neg", "gelu_again", "mul", "t", "mm_1", "mul_1"]
    assert after.ops()[4].args[0].name == "mm" and after.ops()[5].args[1].name == "gelu_again"
    assert record.changes == 1
    assert [node.name for node in saved_for_backward(after)] == ["mm"]


def test_a_dropped_value_is_computed_from_dropped_ones():
    after, record = run_pass(Recompute(), marked(gelu_program(), "mm", "gelu"))
    assert names(after) == ["mm", "gelu", "sum_1", "neg", "mm_again", "gelu_again", "mul", "t", "mm_1", "mul_1"]
    assert record.changes == 2 and saved_for_backward(after) == ()
    assert after.output_values()[2].args[1].name == "mm_again"


def test_several_late_users_share_one_run():
    def function(x, tangent):
        active = x.sin()
        return active.sum(), tangent * active, tangent.exp() * active, active - tangent

    program = two_part_program(function, torch.randn(8), torch.randn(8))
    after, record = run_pass(Recompute(), marked(program, "sin"))
    assert record.changes == 1 and targets(after).count("sin") == 2
    assert len(next(node for node in after.ops() if node.name == "sin_again").users) == 3


def test_a_renewed_value_runs_once_in_each_phase_that_needs_it():
    def function(x, tangent):
        active = x.sin()
        first = tangent * active
        second = first.exp()
        return active.sum(), second * active

    program = two_part_program(function, torch.randn(8), torch.randn(8))
    after, record = run_pass(Recompute(), marked(program, "sin", copies=2, phases=("mul_1",)))
    assert names(after) == ["sin", "sin_again", "mul", "exp", "sum_1", "sin_again_1", "mul_1"]
    assert record.changes == 2


@pytest.mark.parametrize("table", [DecisionTable(), DecisionTable(rows=(Decision("mm", Action.SAVE, 0, 0.0, ""),))])
def test_does_nothing_when_nothing_is_marked(table):
    program = gelu_program()
    program.decisions = table
    assert run_pass(Recompute(), program)[1].changes == 0


def test_a_value_that_the_backward_does_not_read_does_not_run_again():
    after, record = run_pass(Recompute(), marked(gelu_program(), "sum_1"))
    assert record.changes == 0 and "sum_1_again" not in names(after)


def test_a_table_that_was_carried_out_is_not_carried_out_again():
    after = Pipeline((Recompute(), DropDead())).run(marked(gelu_program(), "mm", "gelu"))
    again = Pipeline((Recompute(), DropDead())).run(after)
    assert again.text() == after.text()
    assert again.decisions.executed == (Action.RECOMPUTE,)


@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5), lambda x: x + torch.randn_like(x), torch.bernoulli])
def test_refuses_a_table_that_marks_a_random_draw(draw):
    def function(x, tangent):
        noisy = draw(x)
        return noisy.sum(), tangent * noisy, tangent * x

    program = two_part_program(function, torch.rand(8), torch.randn(8))
    drawn = next(node.name for node in program.ops() if ops.is_random(node))
    with pytest.raises(PassError, match="cannot run again"):
        Pipeline((Recompute(),)).run(marked(program, drawn))


def test_refuses_uninitialised_memory():
    def function(x, tangent):
        space = torch.empty_like(x)
        return x.sum() + space.sum(), tangent * space

    program = two_part_program(function, torch.randn(8), torch.randn(8))
    with pytest.raises(PassError, match="cannot run again"):
        Pipeline((Recompute(),)).run(marked(program, "empty_like"))


def test_refuses_decisions_about_values_that_are_not_there():
    with pytest.raises(PassError, match="does not have"):
        Pipeline((Recompute(),)).run(marked(gelu_program(), "relu"))


def test_what_is_computed_from_a_draw_reads_the_draw_that_was_made():
    def function(x, tangent):
        mask = torch.bernoulli(x, 0.5)
        scaled = (mask * x).exp()
        return scaled.sum(), tangent * scaled

    program = two_part_program(function, torch.rand(8), torch.randn(8))
    after, _ = run_pass(Recompute(), marked(program, "mul", "exp"))
    assert targets(after).count("bernoulli") == 1
    assert next(node for node in after.ops() if node.name == "mul_again").args[0].name == "bernoulli"


# ---- views and tuples ---------------------------------------------------------------------------------------------


def test_views_are_made_again_of_what_runs_again():
    def function(x, tangent):
        wide = x.sin()
        turned = wide.t()
        return wide.sum(), tangent @ turned, tangent * wide

    program = two_part_program(function, torch.randn(4, 4), torch.randn(4, 4))
    after, record = run_pass(Recompute(), marked(program, "sin"))
    turned = next(node for node in after.ops() if node.name == "t_again")
    assert turned.args[0].name == "sin_again" and record.changes == 2
    assert saved_for_backward(Pipeline((DropDead(),)).run(after)) == ()


def test_memory_of_late_views_is_that_of_the_twin():
    """A late view of a dropped value must not be counted, nor written, as memory of the first run."""

    def function(x, tangent):
        wide = x.sin()
        return wide.sum(), tangent.t() * wide.t(), (tangent + wide).view(16)

    program = two_part_program(function, torch.randn(4, 4), torch.randn(4, 4))
    after, _ = run_pass(Recompute(), marked(program, "sin"))
    plan = plan_memory(Pipeline((DropDead(),)).run(after))
    first_use = next(i for i, node in enumerate(plan.order) if node.name == "sin_again")
    assert plan.live_bytes[first_use] == 4 + 16 * 4  # the sum, and one copy of the sines


def test_elements_of_a_tuple_come_from_one_more_run():
    def function(x, weight, tangent):
        normed, mean, rstd = aten.native_layer_norm(x, [8], weight, None, 1e-5)
        gradients = aten.native_layer_norm_backward(tangent, x, [8], mean, rstd, weight, None, [True, True, False])
        return normed.sum(), gradients[0], gradients[1]

    program = two_part_program(function, torch.randn(4, 8), torch.randn(8), torch.randn(4, 8))
    picked = [node.name for node in program.ops() if node.name.startswith("getitem")]
    after, record = run_pass(Recompute(), marked(program, *picked[1:3]))
    assert targets(after).count("native_layer_norm") == 2
    assert record.changes == 3  # the norm, mean and rstd; the normed value is not read again


def test_attention_runs_again_whole():
    def function(q, k, v, tangent):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward(tangent, q, k, v, out, lse, 0.0, True)
        return out.sum(), *back

    program = two_part_program(function, *(torch.randn(1, 2, 6, 4) for _ in range(4)))
    picked = [node.name for node in program.ops() if node.name in ("getitem", "getitem_1")]
    after, record = run_pass(Recompute(), marked(program, *picked))
    assert targets(after).count("_scaled_dot_product_flash_attention_for_cpu") == 2 and record.changes == 3


# ---- whole steps --------------------------------------------------------------------------------------------------


@functools.cache
def planned_tiny(name: str) -> Planned:
    """The step of a tiny model before anything is decided."""
    tiny = tiny_model(name)
    return planned_step(tiny.model, tiny.batch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet", "transformer-dropout"])
def test_no_bit_of_a_step_changes_whatever_is_dropped(name, seed):
    step = planned_tiny(name)
    outcome = random_outcome(step.graph, seed)
    program = marked(step.program.copy(), *(step.graph.nodes[step.graph.value[s]].name for s in outcome.choice.dropped))
    Pipeline((Recompute(), DropDead())).run(program, verify=Verify.NUMERIC)


class Deep(nn.Module):
    """Eight layers whose activations outweigh their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def deep() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Deep(), torch.randn(256, 16)


def test_predicted_peak_is_measured_and_lower():
    reports = []
    for policy in (None, EveryN(2)):
        model, x = deep()
        step = graphopt.compile(model, ["loss"], optimizer=graphopt.optim.SGD(lr=0.1), checkpoint=policy)
        step(x=x)
        reports.append(step.report(measure=True))
    for report in reports:
        assert report.measured_peak_bytes == report.predicted_peak_bytes
    assert reports[1].measured_peak_bytes < 0.7 * reports[0].measured_peak_bytes


@pytest.mark.parametrize("policy", [EveryN(1), EveryN(3), Manual(["layers.*"])], ids=str)
def test_buffers_of_a_compiled_module_are_updated_once_and_read_as_they_were(policy):
    model, x = deep()
    twin = copy.deepcopy(model)
    plain, dropped = graphopt.compile(twin, ["loss"]), graphopt.compile(model, ["loss"], checkpoint=policy)
    for _ in range(2):
        plain(x)["loss"].backward()
        dropped(x)["loss"].backward()
    for (name, left), right in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    for left, right in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    assert model.layers[0][1].num_batches_tracked == 2


class Remembers(nn.Module):
    """The forward reads a buffer that it then overwrites; what depends on the old content can run again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        shifted = (x + self.seen).sin() * self.weight
        self.seen.add_(1.0)
        return {"loss": (shifted.exp() * self.weight).sum()}


def test_what_runs_again_reads_a_buffer_as_the_forward_found_it():
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    gradients = []
    for policy in (None, Manual(lambda value: value.op != "aten.add.Tensor" or value.spec != "f32[16]")):
        model = Remembers()
        compiled = graphopt.compile(model, ["loss"], checkpoint=policy)
        for _ in range(3):
            compiled(x)["loss"].backward()
        assert torch.equal(model.seen, torch.full((16,), 3.0))
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


# ---- the pass with a budget of its own ----------------------------------------------------------------------------


def test_with_a_budget_it_decides_and_acts():
    model, x = deep()
    program = Pipeline((DropDead(),)).run(step_program(model, {"x": x}))
    plan = plan_memory(program)
    budget = plan.resident_bytes + int(0.7 * plan.peak_bytes)
    after, record = run_pass(Recompute(budget=str(budget)), program)
    assert record.changes > 0
    runs = plan_memory(Pipeline((DropDead(), ReuseLastUse())).run(after))
    assert runs.resident_bytes + runs.peak_bytes <= budget


def test_a_budget_that_nothing_meets_names_the_smallest_that_something_does():
    model, x = deep()
    program = Pipeline((DropDead(),)).run(step_program(model, {"x": x}))
    with pytest.raises(BudgetError) as caught:
        Pipeline((Recompute(budget="1KiB"),)).run(program)
    assert str(caught.value.smallest_bytes) in str(caught.value)
    Pipeline((Recompute(budget=str(caught.value.smallest_bytes)),)).run(program)
