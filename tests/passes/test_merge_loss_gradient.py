"""merge-loss-gradient fires in whole steps, where the gradient of the loss is known before it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphopt.build import bind_batch
from graphopt.capture.differentiate import differentiate
from graphopt.capture.export import OutputRequest, capture_program
from graphopt.capture.update import UpdateRequest, append_update
from graphopt.capture.update_bucket import make_bucket
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import OutputKind
from graphopt.optim import SGD
from graphopt.passes.fuse_linear_loss import FuseLinearLoss
from graphopt.passes.merge_loss_gradient import MergeLossGradient
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import run_pass
from tests.support.heads import CLASSES, HeadModel, head_batch

FUSED = Pipeline((FuseLinearLoss(min_logits_bytes=0, chunk=5),))


def flat(logits, y):
    return logits.reshape(-1, CLASSES), y.reshape(-1)


def cross_entropy(logits, y):
    return F.cross_entropy(*flat(logits, y))


def joint_program(model: HeadModel) -> Program:
    """Forward with the fused loss, and backward."""
    captured = capture_program(model, bind_batch(model, head_batch(ignored=0)), OutputRequest(("loss",)))
    wrt = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return differentiate(FUSED.run(captured.program), roots=["loss"], wrt=wrt)


def step_program(model: HeadModel) -> Program:
    """With an update by SGD behind it."""
    joint = joint_program(model)
    names = tuple(output.name for _, output in joint.signature.outputs_of(OutputKind.GRAD))
    rule = SGD(lr=0.1)
    bucket = make_bucket(rule, rule.options(), name="0", parameters=names)
    return append_update(joint, UpdateRequest(rule, (bucket,), clip=False))


def operators(program: Program) -> list[str]:
    """Names of the fused operators in the program."""
    return [node.target._opname for node in program.ops() if getattr(node.target, "namespace", "") == "graphopt"]


MERGED = {
    "plain": cross_entropy,
    "sum": lambda o, y: F.cross_entropy(*flat(o, y), reduction="sum"),
    "scaled": lambda o, y: cross_entropy(o, y) * 0.25 / 3,
    "with_another_loss": lambda o, y: cross_entropy(o, y),
    "smoothed": lambda o, y: F.cross_entropy(*flat(o, y), label_smoothing=0.1),
    "divided_by_labels": lambda o, y: F.cross_entropy(*flat(o, y), reduction="sum") / (y != -100).sum(),
    "z_loss": lambda o, y: cross_entropy(o, y) + 1e-3 * flat(o, y)[0].logsumexp(-1).square().mean(),
    "capped": lambda o, y: cross_entropy(3 * torch.tanh(o / 3), y),
}


@pytest.mark.parametrize("form", MERGED)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_one_operator_is_left(form, bias):
    program = step_program(HeadModel(MERGED[form], bias=bias))
    assert operators(program) == ["linear_cross_entropy", "linear_cross_entropy_backward"]

    after, record = run_pass(MergeLossGradient(), program)

    assert record.changes == 1 and operators(after) == ["linear_cross_entropy_with_gradient"]


def test_peak_does_not_rise():
    program = step_program(HeadModel(cross_entropy))
    after, _ = run_pass(MergeLossGradient(), program)
    assert plan_memory(after).peak_bytes <= plan_memory(program).peak_bytes


REFUSED = {
    "no_reduction": (lambda o, y: F.cross_entropy(*flat(o, y), reduction="none").square().mean(), "no reduction"),
    "squared": (lambda o, y: cross_entropy(o, y).square(), "not known before the loss"),
    "log_sum_exp": (
        lambda o, y: cross_entropy(o, y) + flat(o, y)[0].logsumexp(-1).square().sum(),
        "log-sum-exp has a gradient",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_must_not_fire(form):
    loss, reason = REFUSED[form]
    after, record = run_pass(MergeLossGradient(), step_program(HeadModel(loss)))
    assert record.changes == 0 and reason in record.refusals[0].reason
    assert operators(after) == ["linear_cross_entropy", "linear_cross_entropy_backward"]


def test_keeps_a_backward_that_its_user_calls_later():
    program = joint_program(HeadModel(cross_entropy))
    program.stage = Stage.STEP  # as a module without an optimizer is built
    _, record = run_pass(MergeLossGradient(), program)
    assert record.changes == 0 and "updates nothing" in record.refusals[0].reason


def test_keeps_a_head_in_low_precision():
    model = HeadModel(cross_entropy).bfloat16()
    batch = head_batch(ignored=0)
    batch["x"] = batch["x"].bfloat16()
    captured = capture_program(model, bind_batch(model, batch), OutputRequest(("loss",)))
    joint = differentiate(FUSED.run(captured.program), roots=["loss"], wrt=["head.weight"])
    rule = SGD(lr=0.1)
    bucket = make_bucket(rule, rule.options(), name="0", parameters=("head.weight",))
    program = append_update(joint, UpdateRequest(rule, (bucket,), clip=False))

    _, record = run_pass(MergeLossGradient(), program)

    assert record.changes == 0 and "a copy in torch.float32" in record.refusals[0].reason


def test_several_losses_of_one_step_are_each_merged():
    class Two(HeadModel):
        def forward(self, x, y):
            return {"loss": cross_entropy(self.head(x), y) + cross_entropy(self.head(self.body(x)), y)}

    after, record = run_pass(MergeLossGradient(), step_program(Two(cross_entropy)))
    assert record.changes == 2 and operators(after) == ["linear_cross_entropy_with_gradient"] * 2


def test_only_gradients_that_are_needed_are_asked_for():
    model = HeadModel(cross_entropy, bias=True)
    model.body.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    after, _ = run_pass(MergeLossGradient(), step_program(model))
    merged = next(node for node in after.ops() if "with_gradient" in str(node.target))
    assert merged.args[-1] == [False, True, False]
