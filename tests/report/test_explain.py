"""explain: every kind of name is found, and an unknown one gets the closest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphopt.errors import GraphoptError
from graphopt.ir.decisions import Action, Decision, DecisionTable
from graphopt.pipeline.pass_base import Refusal
from graphopt.report.explain import explain
from tests.support.steps import step_executable


def test_a_parameter_has_its_gradient_and_its_state():
    text = explain(step_executable(), "head.weight")
    assert text.startswith("param head.weight: f32[4,32]\n  bytes: 512 B, held by the caller for the whole step\n")
    assert "gradient: " in text and "state: exp_avg.head.weight: f32[4,32], 512 B" in text
    assert "state: exp_avg_sq.head.weight" in text


def test_a_value_has_its_line_its_life_and_its_bytes():
    executable = step_executable()
    tanh = next(node for node in executable.program.ops() if "tanh" in str(node.target))
    text = explain(executable, tanh.name)
    assert "value tanh: f32[8,32]" in text
    assert "steps.py:" in text and "body.1" in text
    assert "made by: aten.tanh_.default(addmm)" in text
    assert "alive: from op" in text and "forward) to op" in text and "backward)" in text
    assert "1.00 KiB (1,024 B)" in text
    assert "saved for backward: yes" in text


def test_a_module_has_its_parameters_its_values_and_what_it_saves():
    text = explain(step_executable(), "body")
    assert text.startswith("module body: ")
    assert "param body.0.weight: f32[32,16], 2.00 KiB (2,048 B)" in text
    assert "saved for backward: 1.00 KiB (1,024 B)" in text
    assert "value tanh: f32[8,32]" in text


def test_an_output_is_explained_as_the_value_it_is():
    text = explain(step_executable(), "loss")
    assert text.startswith("output loss (user): f32[]\n  is the value ")


def test_a_batch_entry_and_a_number_are_inputs():
    executable = step_executable()
    assert explain(executable, "x").startswith("batch x: f32[8,16]\n")
    assert explain(executable, "lr.0").startswith("scalar lr.0: float\n")


def test_refusals_about_a_value_are_told():
    executable = step_executable()
    program = executable.program
    record = replace(program.history[0], refusals=(Refusal("tanh", "it is the last of its kind"),))
    program.history = (record, *program.history[1:])
    for name in ("tanh", "body"):
        assert f"{record.name} declined at tanh: it is the last of its kind" in explain(executable, name)


def test_a_reason_that_a_decision_gives_is_told_once():
    executable = step_executable()
    program, reason = executable.program, "its update waits for the norm"
    decision = Decision(value="tanh", action=Action.KEEP, reason=reason, nbytes=1024, seconds=0.0)
    record = replace(program.history[0], refusals=(Refusal("tanh", reason),))
    program.history, program.decisions = (record, *program.history[1:]), DecisionTable("by hand", (decision,))
    assert explain(executable, "tanh").count(reason) == 1


def test_an_unknown_name_is_an_error_with_the_closest_names():
    with pytest.raises(GraphoptError, match=r"came 'head.weigth'; the closest are head\.weight"):
        explain(step_executable(), "head.weigth")
    with pytest.raises(GraphoptError, match="there are, for example, "):
        explain(step_executable(), "!!!")
