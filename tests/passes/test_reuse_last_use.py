"""reuse-last-use: writes into operands that die, and into nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphopt.capture.trace import trace_function
from graphopt.errors import PipelineError
from graphopt.ir import ops
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Stage
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.default import step_pipeline
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import program_of, run_pass, targets
from tests.support.steps import step_program, two_layers

ROWS = torch.randn(4, 6)
FLOAT_BYTES = 4


def test_writes_into_an_operand_that_dies():
    after, record = run_pass(ReuseLastUse(), program_of(lambda x: (x @ x.t()).exp() + 1, ROWS))
    assert targets(after) == ["t", "mm", "exp_", "add_"]
    assert record.changes == 2


def test_uses_the_out_form_when_the_second_operand_dies():
    after, record = run_pass(ReuseLastUse(), program_of(lambda x, y: y - x.exp(), ROWS, ROWS))
    assert record.changes == 1
    assert "aten.sub.out(arg1_1, exp, out=exp)" in after.text()


def test_saves_the_bytes_of_the_result():
    before = program_of(lambda x: x.exp().sin().cos(), ROWS)
    after, _ = run_pass(ReuseLastUse(), before)
    result_bytes = ROWS.numel() * FLOAT_BYTES
    assert plan_memory(before).peak_bytes == 2 * result_bytes
    assert plan_memory(after).peak_bytes == result_bytes


def _read_again(x):
    exp = x.exp()
    return exp.sin() @ exp.t()


def _view_read_again(x):
    exp = x.exp()
    return exp.sin() @ exp[:1].t()


def _returned(x):
    exp = x.exp()
    return exp, exp.sin()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp(),  # an input belongs to the caller
        _returned,
        _read_again,
        _view_read_again,
        lambda x: x.exp() > 0,  # the result has another dtype
        lambda x: torch.eye(4)[1:].exp(),  # the operand does not fill its storage
        lambda x: x.sum(0) + x,  # the result is larger
    ],
)
def test_leaves_what_lives_on_or_does_not_fit(function):
    before = program_of(function, ROWS)
    after, record = run_pass(ReuseLastUse(), before)
    assert record.changes == 0
    assert after.text() == before.text()


def test_an_operand_read_through_two_different_views_stays():
    after, record = run_pass(ReuseLastUse(), program_of(lambda x: (lambda e: e + e.t())((x @ x.t()).exp()), ROWS))
    assert "add_" not in targets(after)
    assert record.changes == 1  # exp alone


def test_parameters_and_state_are_updated_where_they_lie():
    model, batch = two_layers()
    before = step_program(model, batch)
    after = step_pipeline().run(before, verify="numeric")
    text = after.text()
    assert "aten.mul_.Tensor(p_body_0_weight" in text
    assert "aten.addcdiv_.default(" in text
    assert plan_memory(after).peak_bytes < plan_memory(before).peak_bytes


def test_the_gradient_of_an_activation_is_written_into_what_arrives():
    after, _ = run_pass(
        ReuseLastUse(), program_of(lambda g, x: torch.ops.aten.gelu_backward(g @ g.t(), x), ROWS, torch.randn(4, 4))
    )
    assert "grad_input=mm" in after.text()


def test_must_be_the_last_of_its_pipeline():
    with pytest.raises(PipelineError, match="must be the last"):
        Pipeline((ReuseLastUse(), DropDead()))


def test_runs_at_every_stage():
    program = trace_function(lambda x: F.relu(x.exp()), ROWS, stage=Stage.STEP)
    _, record = run_pass(ReuseLastUse(), program)
    assert record.changes == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.view_as_real((z * 2).conj().resolve_conj() * 3) + 1,
        lambda z: (z * 2).conj() * 3 + 1,
        lambda z: (z * 2).conj().imag.exp() + (z * 3).conj().imag.neg(),
        lambda z: torch.view_as_real((z.exp().conj() * 2).resolve_conj()).exp(),
    ],
)
def test_leaves_conjugate_and_negative_views_alone(function):
    z = torch.randn(4, 6, dtype=torch.complex64)
    expected = function(z)
    after, _ = run_pass(ReuseLastUse(), program_of(function, z))
    assert torch.equal(after.run([z])[0], expected)


def test_does_not_join_the_memory_of_a_conjugate_view():
    z = torch.randn(4, dtype=torch.complex64)
    program = program_of(lambda z: torch.view_as_real(z.exp().conj() * 2).sum(), z)
    (clone,) = (node for node in program.ops() if ops.is_call(node, torch.ops.aten.clone.default))
    program.replace(clone, clone.args[0])
    program.refresh()
    after, record = run_pass(ReuseLastUse(), program, inputs=[z])
    assert record.changes == 0 and targets(after) == ["exp", "_conj", "mul", "view_as_real", "sum"]
