"""batch-updates: one call for parameters that are updated alike, and nothing else joined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.capture.update import UpdateRequest, append_update
from graphopt.capture.update_bucket import make_bucket
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import OutputKind
from graphopt.optim.state import BlockState, Weights
from graphopt.passes.batch_updates import BatchUpdates
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import run_pass
from tests.support.steps import training_program_of, two_layers

LIST, SINGLE = "block_adam_list_", "block_adam_"


def updates_of(program: Program) -> list[str]:
    """The updates by blocks in order."""
    return [node.target._opname for node in program.ops() if getattr(node.target, "namespace", "") == "graphopt"]


def in_place_program(*, clip: bool = True, weights: Weights = Weights.OWN, num_groups: int = 1) -> Program:
    """A step whose parameters are all updated by blocks, writing in place."""
    optimizer = optim.AdamW8bit(lr=1e-2)
    model, batch = two_layers()
    if weights is not Weights.OWN:
        model.bfloat16()
        batch = {name: tensor.bfloat16() for name, tensor in batch.items()}
    joint = training_program_of(model, batch)
    names = [output.name for _, output in joint.signature.outputs_of(OutputKind.GRAD)]
    buckets = tuple(
        make_bucket(
            optimizer,
            optimizer.options(),
            name=str(i),
            parameters=tuple(names[i::num_groups]),
            state_format=BlockState(),
            weights=weights,
        )
        for i in range(num_groups)
    )
    program = append_update(joint, UpdateRequest(optimizer, buckets, clip=clip))
    release = default_pipeline(Stage.STEP).without("reuse-last-use").without("batch-updates")
    return Pipeline((ReuseLastUse(),)).run(release.run(program))


def test_joins_all_updates_that_wait_for_the_norm():
    after, record = run_pass(BatchUpdates(), in_place_program())
    assert updates_of(after) == [LIST]
    assert record.changes == 3  # four parameters


def test_does_not_join_updates_that_run_where_their_gradients_are():
    after, record = run_pass(BatchUpdates(), in_place_program(clip=False))
    assert len(updates_of(after)) > 1
    assert record.changes == 4 - len(updates_of(after))


def test_does_not_join_updates_with_other_numbers():
    after, record = run_pass(BatchUpdates(), in_place_program(num_groups=2))
    assert updates_of(after) == [LIST, LIST]
    assert record.changes == 2


def test_a_second_run_changes_nothing():
    once, _ = run_pass(BatchUpdates(), in_place_program())
    twice, record = run_pass(BatchUpdates(), once)
    assert record.changes == 0
    assert twice.text() == once.text()


def test_needs_no_more_memory():
    before = in_place_program()
    after, _ = run_pass(BatchUpdates(), before)
    assert plan_memory(after).peak_bytes <= plan_memory(before).peak_bytes


def test_a_copy_that_is_read_behind_its_update_stays_behind():
    after, _ = run_pass(BatchUpdates(), in_place_program(weights=Weights.MASTER))
    order = list(after.graph.nodes)
    update = next(node for node in order if getattr(node.target, "_opname", "") == LIST)
    masters = [node for node in after.placeholders() if node.name.startswith("s_master")]
    copies = [user for master in masters for user in master.users if user not in (update, order[-1])]
    assert len(copies) == 4 and all(order.index(copy) > order.index(update) for copy in copies)


@pytest.mark.parametrize("weights", list(Weights))
def test_training_gives_the_same_bits_with_and_without(weights, monkeypatch):
    def train() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 8)).to(
            torch.float32 if weights is Weights.OWN else torch.bfloat16
        )
        batch = torch.randn(6, 16, dtype=model[0].weight.dtype)
        step = graphopt.compile(
            model,
            ["loss"],
            loss=lambda out, _: out.float().square().mean(),
            optimizer=optim.AdamW8bit(lr=1e-2, state="int8"),
            clip_grad_norm=1.0,
            backend="aten",
        )
        step.state.choices._weights = weights
        for _ in range(3):
            step(batch)
        return tuple(parameter.detach().clone() for parameter in model.parameters())

    joined = train()
    monkeypatch.setattr(BatchUpdates, "apply", lambda self, program: graphopt.pipeline.pass_base.Changes(0))
    single = train()
    assert all(torch.equal(left, right) for left, right in zip(joined, single, strict=True))
