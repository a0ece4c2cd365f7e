"""keep-quantized: what it leaves as it was."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import saved_for_backward
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.passes.keep_quantized import KeepQuantized
from graphopt.pipeline.pipeline import Pipeline
from tests.support.fp8 import QUANTIZES, joint_program, tagged
from tests.support.graphs import run_pass
from tests.support.kept_fp8 import (
    TOKENS,
    WIDTH,
    Attention,
    Gated,
    Inside,
    Plain,
    Rectified,
    gradients,
    joint,
    kept,
    recipe,
)


def test_leaves_programs_without_fp8_alone():
    program = joint_program(Inside(Gated()), {"x": torch.randn(TOKENS, WIDTH)})
    after, record = run_pass(KeepQuantized(), program)
    assert record.changes == 0 and not after.decisions.rows


class Random(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5)


class Softmax(nn.Module):
    def forward(self, x):
        return x.softmax(-1) * x


class Quotient:
    def __call__(self, x):
        return x / (x * x)


class Compared(nn.Module):
    def forward(self, x):
        return x * (x - x.amax(-1, keepdim=True)).clamp(-1, 1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ((Gated, torch.tanh), "subtracts it from one"),
        ((Gated, torch.sigmoid), "subtracts it from one"),
        ((Softmax,), "softmax"),
        ((Random,), "random draw"),
        ((Compared,), "compares it"),
        ((Rectified, F.relu6), "not known to bear it"),
        ((Rectified, F.leaky_relu), "not known to bear it"),
        ((Rectified, F.elu), "not known to bear it"),
        ((Rectified, torch.abs), "jumps"),
        ((Rectified, functools.partial(F.threshold, threshold=0.1, value=0.0)), "jumps"),
        ((Rectified, Quotient()), "divides by it"),
        ((Attention,), "through an exponential"),
        ((Attention,), "the difference of what comes of the two"),
    ],
    ids=[
        "tanh",
        "sigmoid",
        "softmax",
        "dropout",
        "compared",
        "relu6",
        "leaky relu",
        "elu",
        "abs",
        "threshold",
        "quotient",
        "queries",
        "values",
    ],
)
def test_what_does_not_bear_the_error_is_kept_as_it_is(kind, why):
    after, _ = kept(joint(*kind))
    saved = after.decisions.with_action(Action.SAVE)
    assert any(why in each.reason for each in saved) or (why == "random draw" and _mask_is_whole(after))


def _mask_is_whole(program):
    masks = [
        n for n in saved_for_backward(program) if "bernoulli" in str(n.target) or n.meta["val"].dtype is torch.bool
    ]
    return bool(masks)


def test_what_a_product_in_two_bytes_reads_is_kept_as_it_is():
    before = joint(Gated, roles=("forward", "input gradient"))  # weight gradients are not in FP8
    after, _ = kept(before)
    kept_whole = after.decisions.with_action(Action.SAVE)
    assert len(kept_whole) == 4 and all("which is not in FP8" in each.reason for each in kept_whole)


def test_what_the_loss_is_made_from_is_kept_as_it_is():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return {"loss": (self.second(self.first(x)) * 2).square().mean()}

    before = tagged(joint_program(Loss(), {"x": torch.randn(TOKENS, WIDTH)}))
    before = Pipeline((InsertQuantize(), DropDead())).run(before)
    after, _ = kept(before)
    assert not any("read back" in each.reason for each in after.decisions.rows)
    assert any("loss itself" in each.reason for each in after.decisions.rows)


def test_an_output_is_not_kept_a_second_time_as_codes():
    class Returned(Inside):
        def forward(self, x):
            hidden = self.inner(self.first(x))
            return {"loss": self.head(hidden).float().square().mean(), "hidden": hidden}

    torch.manual_seed(0)
    model = Returned(Plain()).bfloat16()
    forward = graphopt.capture(model, {"x": torch.randn(TOKENS, WIDTH).bfloat16()}, outputs=["loss", "hidden"])
    names = [name for name, _ in model.named_parameters()]
    program = tagged(graphopt.differentiate(forward, roots=["loss"], wrt=names))
    before = Pipeline((InsertQuantize(), DropDead())).run(program)
    after, record = kept(before)
    assert record.changes == 1 and any("an output" in each.reason for each in after.decisions.rows)
    assert all(torch.equal(*pair) for pair in zip(gradients(before), gradients(after), strict=True))


def test_small_values_are_left_alone(monkeypatch):
    monkeypatch.setattr("graphopt.passes.keep_quantized._WORTH_QUANTIZING", 2**20)
    after, record = kept(joint(Gated))
    assert record.changes == 0 and not after.decisions.rows


@pytest.mark.parametrize("saved", ["none", "products", "all"])
def test_scales_are_no_values_to_decide_about_however_large(saved, monkeypatch):
    monkeypatch.setattr("graphopt.passes.keep_quantized._WORTH_QUANTIZING", 1)
    chosen = recipe(saved, "rowwise")
    after, _ = kept(joint(Attention, chosen=chosen), chosen)
    parts = {part.name for call in after.ops() if call.target in QUANTIZES for part in call.users}
    assert not parts & {each.value for each in after.decisions.rows}
