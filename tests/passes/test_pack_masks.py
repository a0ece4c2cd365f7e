"""pack-masks: coin tosses that the backward part needs are kept as bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.checkpoint import EveryN
from graphopt.ir import ops
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import saved_bytes
from graphopt.passes.pack_masks import PackMasks
from graphopt.pipeline.pipeline import Pipeline
from tests.support.models import tiny_model

WIDTH, ROWS, DEPTH = 64, 256, 4


class Block(nn.Module):
    def __init__(self, drop=0.5):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), drop

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x).tanh(), self.drop)


class Stack(nn.Module):
    def __init__(self, drop=0.5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


def trained(model, batch, **options):
    model = copy.deepcopy(model)
    step = graphopt.compile(model, ["loss"], optimizer=optim.AdamW(), backend="aten", **options)
    torch.manual_seed(3)
    loss = [step(**batch).loss for _ in range(3)][-1]
    return step, loss, [parameter.detach() for parameter in model.parameters()], torch.get_rng_state()


def stack_and_batch(drop=0.5):
    torch.manual_seed(0)
    return Stack(drop), {"x": torch.randn(ROWS, WIDTH)}


@pytest.mark.parametrize("options", [{"checkpoint": EveryN(1)}, {"passes": [PackMasks()]}], ids=["every-1", "alone"])
def test_bits_and_generator_are_those_of_the_step_without(options):
    model, batch = stack_and_batch()
    _, loss, parameters, generator = trained(model, batch)
    step, packed_loss, packed_parameters, packed_generator = trained(model, batch, **options)
    assert any(record.name == "pack-masks" and record.changes == DEPTH for record in step.program.history)
    assert torch.equal(loss, packed_loss) and torch.equal(generator, packed_generator)
    assert all(torch.equal(one, other) for one, other in zip(parameters, packed_parameters, strict=True))


def test_what_is_kept_for_the_backward_part_is_one_bit_an_element():
    model, batch = stack_and_batch()
    step, *_ = trained(model, batch, checkpoint=EveryN(1))
    masks = [row for row in step.program.decisions.with_action(Action.SAVE) if row.nbytes == ROWS * WIDTH // 8]
    assert len(masks) == DEPTH
    # One mask of a bit and the input of 4 bytes an element for each block, and small things.
    assert saved_bytes(step.program) < DEPTH * ROWS * WIDTH * (1 / 8 + 4) + 4096
    report = step.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_a_second_run_changes_nothing_and_views_count_as_the_mask():
    model, batch = stack_and_batch()
    step, *_ = trained(model, batch, checkpoint=EveryN(1))
    functional = next(record for record in step.program.history if record.name == "pack-masks")
    assert functional.changes == DEPTH
    once = Pipeline((PackMasks(),)).run(step_program(model, batch))
    assert Pipeline((PackMasks(),)).run(once).history[-1].changes == 0


def step_program(model, batch):
    joint = graphopt.build.training_program(model, batch, outputs=["loss"])
    program = graphopt.optimize(joint).copy()
    program.stage = graphopt.ir.program.Stage.STEP
    return program


def test_draws_that_only_the_forward_part_reads_stay():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return {"loss": self.linear(x).mean() + torch.bernoulli(torch.full((ROWS,), 0.5)).sum()}

    after = Pipeline((PackMasks(),)).run(step_program(Noise(), {"x": torch.randn(ROWS, WIDTH)}))
    record = after.history[-1]
    assert record.changes == 0
    assert all("does not need it" in refusal.reason for refusal in record.refusals)


def test_a_model_without_dropout_has_nothing_to_pack():
    model, batch = stack_and_batch(drop=0.0)
    after = Pipeline((PackMasks(),)).run(step_program(model, batch))
    assert after.history[-1].changes == 0 and not any(ops.is_coin_toss(node) for node in after.ops())


@pytest.mark.parametrize("name", ["gpt2", "transformer-dropout", "odd-dropouts"])
def test_models_with_dropout_train_bit_equal_for_less(name):
    tiny = tiny_model(name)
    _, loss, parameters, _ = trained(tiny.model, tiny.batch)
    _, packed_loss, packed_parameters, _ = trained(tiny.model, tiny.batch, checkpoint=EveryN(1))
    assert torch.equal(loss, packed_loss)
    assert all(torch.equal(one, other) for one, other in zip(parameters, packed_parameters, strict=True))
