"""recast-weights: low-precision copies of weights do not wait for the backward part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import checkpoint
from graphopt.ir.decisions import Action
from graphopt.ir.kept_values import forward_values
from graphopt.ir.liveness import saved_bytes
from graphopt.ir.program import Stage
from graphopt.operators.fp8 import QUANTIZE, QUANTIZE_BOTH, QUANTIZE_DELAYED
from graphopt.optim import SGD, AdamW
from graphopt.passes import recast_weights
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.passes.keep_quantized import KeepQuantized
from graphopt.passes.recast_weights import RecastWeights
from graphopt.passes.release_gradients import ReleaseGradients
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.default import step_pipeline
from graphopt.pipeline.pipeline import Pipeline
from graphopt.planner.decide import MemoryRequest
from tests.support.fp8 import joint_program, tagged, to_16
from tests.support.graphs import run_pass
from tests.support.steps import step_program

aten = torch.ops.aten
WIDTH, ROWS, LAYERS = 16, 64, 3
COPY_BYTES = WIDTH * WIDTH * 2


@pytest.fixture(autouse=True)
def _small_copies_matter(monkeypatch):
    monkeypatch.setattr(recast_weights, "_WORTH_RECASTING", COPY_BYTES)
    monkeypatch.setattr(recast_weights, "_PATIENCE", 1.0)


class Layers(nn.Module):
    """Linear layers in bfloat16 over float32 weights; ``shared``: all of one weight."""

    def __init__(self, *, low=torch.bfloat16, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(1 if shared else LAYERS))
        self.low, self.times = low, LAYERS if shared else 1

    def forward(self, x):
        for low in [layer.weight.to(self.low) for layer in self.layers] * self.times:
            x = nn.functional.linear(x.to(self.low), low).tanh()
        return {"loss": x.float().square().mean()}


def program(model=None, optimizer=None):
    return step_program(model or Layers(), {"x": torch.randn(ROWS, WIDTH)}, clip=False, optimizer=optimizer or SGD())


def copies(program):
    """Names of all casts of parameters."""
    return [n.name for n in program.ops() if n.target is aten._to_copy.default and n.args[0].op == "placeholder"]


def recast(program):
    return [name for name in copies(program) if "again" in name]


def test_copies_are_made_again_for_the_backward_part():
    before = program()
    after, record = run_pass(RecastWeights(), before)
    # The first layer's input needs no gradient, so nothing reads its weight again.
    assert len(recast(before)) == 0 and len(recast(after)) == record.changes == LAYERS - 1
    assert saved_bytes(before) - saved_bytes(after) == (LAYERS - 1) * COPY_BYTES


def test_each_copy_is_made_right_before_its_use():
    after, _ = run_pass(RecastWeights(), program())
    for node in after.ops():
        if node.name in recast(after):
            reader = node.next
            while reader.target is aten.t.default:
                reader = reader.next
            assert reader.target is aten.mm.default


def test_uses_of_one_weight_that_are_far_apart_get_copies_of_their_own():
    after, record = run_pass(RecastWeights(), program(Layers(shared=True)))
    assert record.changes == len(recast(after)) == LAYERS - 1


def test_uses_of_one_weight_that_are_close_share_a_copy():
    def use(position):
        return recast_weights._Use(None, None, position, seconds=10.0)

    clock = [0.0, 1.0, 50.0, 51.0, 52.0]  # call 1 takes 49 seconds, the others one
    groups = recast_weights._late_uses([use(0), use(2), use(3)], clock, split=1)
    assert [[each.position for each in group] for group in groups] == [[2, 3]]
    assert recast_weights._late_uses([use(0), use(2), use(3)], clock, split=4) == []


def test_the_table_says_what_was_decided_and_why():
    after, _ = run_pass(RecastWeights(), program())
    rows = after.decisions.with_action(Action.RECAST)
    assert len(rows) == LAYERS - 1 and {row.nbytes for row in rows} == {COPY_BYTES}
    assert all(row.copies == 1 and row.seconds > 0 and "cast again" in row.reason for row in rows)


def test_a_copy_that_is_needed_again_at_once_is_kept_and_the_table_says_so(monkeypatch):
    monkeypatch.setattr(recast_weights, "_PATIENCE", 1e9)
    after, record = run_pass(RecastWeights(), program())
    assert record.changes == 0 and not after.decisions.with_action(Action.RECAST)
    assert "needed again so soon" in after.decisions.rows[0].reason


@pytest.mark.parametrize("model", [Layers(low=torch.float32), nn.Sequential()], ids=["float32", "activations"])
def test_leaves_programs_without_copies_of_weights_alone(model):
    if isinstance(model, nn.Sequential):

        class Activations(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(WIDTH))

            def forward(self, x):
                return {"loss": (x * self.scale).bfloat16().exp().float().square().mean()}

        model = Activations()
    after, record = run_pass(RecastWeights(), program(model))
    assert record.changes == 0 and not after.decisions.rows


def test_small_copies_are_kept(monkeypatch):
    monkeypatch.setattr(recast_weights, "_WORTH_RECASTING", COPY_BYTES + 1)
    _, record = run_pass(RecastWeights(), program())
    assert record.changes == 0


@pytest.mark.parametrize(("budget", "changes"), [("1GiB", 0), (1000, LAYERS - 1)])
def test_a_budget_that_holds_with_all_copies_kept_keeps_them(budget, changes):
    _, record = run_pass(RecastWeights(budget), program())
    assert record.changes == changes
    assert changes or "holds without it" in record.refusals[0].reason


@pytest.mark.parametrize("optimizer", [SGD(), AdamW()])
def test_updates_wait_for_the_last_copy_and_are_written_in_place(optimizer):
    after = Pipeline((RecastWeights(), ReleaseGradients(), ReuseLastUse())).run(program(optimizer=optimizer))
    inputs = dict(zip(after.placeholders(), after.signature.inputs, strict=True))
    for value, output in zip(after.output_values(), after.signature.outputs, strict=True):
        if output.kind == "param_update":
            while value not in inputs:  # every step of the update writes into the parameter
                assert value.target._schema.name.endswith("_"), value
                value = value.args[0]
            assert inputs[value].name == output.name


@pytest.mark.parametrize("request_", [None, checkpoint.EveryN(1), checkpoint.SqrtN()])
def test_training_is_the_same_bit_by_bit(request_):
    model = Layers()
    twin = copy.deepcopy(model)
    batch = {"x": torch.randn(ROWS, WIDTH)}
    steps = []
    for trained, passes in ((model, "with"), (twin, "without")):
        pipeline = step_pipeline(MemoryRequest(request_))
        if passes == "without":
            pipeline = pipeline.without("recast-weights")
        steps.append(pipeline.run(program(trained)))
    numbers = [step.run(_inputs(step, model, batch)) for step in steps]
    for first, second in zip(*numbers, strict=True):
        assert torch.equal(first, second)
    assert recast(steps[0])


def _inputs(step, model, batch):
    parameters = dict(model.named_parameters())
    values = []
    for entry in step.signature.inputs:
        if entry.name in parameters:
            values.append(parameters[entry.name].detach().clone())
        elif entry.name in batch:
            values.append(batch[entry.name])
        else:
            values.append(torch.ones(()) if entry.kind == "tangent" else 0.1)
    return values


def test_runs_in_every_step_by_default():
    model = Layers()
    step = graphopt.compile(model, outputs=["loss"], optimizer=SGD(lr=0.1))
    step(x=torch.randn(ROWS, WIDTH))
    record = next(record for record in step.report().records if record.name == "recast-weights")
    assert record.changes == LAYERS - 1
    assert "recast" in str(step.report())


# ---- FP8 ------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Layers whose FP8 codes are large beside those of the batch."""

    def __init__(self, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return {"loss": x.float().square().mean()}


def fp8_program(recipe, *, layouts="one", width=WIDTH):
    """Forward and backward with every product in FP8, at the stage that the pass runs at."""
    joint = tagged(joint_program(Wide(width), {"x": torch.randn(ROWS, width)}), pad=to_16)
    joint = Pipeline((InsertQuantize(recipe, layouts), KeepQuantized(recipe), DropDead())).run(joint)
    joint.stage = Stage.STEP
    return joint


def weight_codes(program, width=WIDTH):
    """What the forward part leaves that is FP8 codes of a weight."""
    shape = (width, width)
    values = [value for value in forward_values(program) if value.uses]
    return [v for v in values if v.base.meta["val"].dtype.itemsize == 1 and tuple(v.base.meta["val"].shape) == shape]


@pytest.fixture
def _smaller_copies_matter(monkeypatch):
    monkeypatch.setattr(recast_weights, "_WORTH_RECASTING", WIDTH * WIDTH)


@pytest.mark.usefixtures("_smaller_copies_matter")
@pytest.mark.parametrize("layouts", ["one", "two"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_codes_of_weights_are_made_again_for_the_backward_part_bit_by_bit(recipe, layouts):
    before = fp8_program(recipe, layouts=layouts)
    after, record = run_pass(RecastWeights(), before)
    kept = len(weight_codes(before))
    assert record.changes == kept and weight_codes(after) == []
    assert saved_bytes(before) - saved_bytes(after) >= kept * WIDTH * WIDTH
    rows = [row for row in after.decisions.with_action(Action.RECAST) if "quantized again" in row.reason]
    assert [row.copies for row in rows] == [1] * kept


@pytest.mark.usefixtures("_smaller_copies_matter")
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_codes_that_products_pad_are_padded_again(recipe):
    before = fp8_program(recipe, width=WIDTH + 8)
    after, record = run_pass(RecastWeights(), before)
    kept = weight_codes(before, 2 * WIDTH)
    assert kept and record.changes == len(kept)
    assert weight_codes(after, 2 * WIDTH) == weight_codes(after, WIDTH + 8) == []


@pytest.mark.usefixtures("_smaller_copies_matter")
def test_one_scale_for_a_weight_is_not_looked_for_again():
    after, _ = run_pass(RecastWeights(), fp8_program("tensorwise"))
    again = [node for node in after.ops() if "again" in node.name and node.target in (QUANTIZE, QUANTIZE_DELAYED)]
    assert again and {node.target for node in again} == {QUANTIZE_DELAYED}


@pytest.mark.usefixtures("_smaller_copies_matter")
def test_what_made_two_layouts_makes_the_one_that_is_still_read():
    before = fp8_program("tensorwise", layouts="two")
    after, _ = run_pass(RecastWeights(), before)
    of_weights = [node for node in before.ops() if node.target is QUANTIZE_BOTH and node.args[0].op == "placeholder"]
    assert of_weights and not [n for n in after.ops() if n.target is QUANTIZE_BOTH and n.args[0].op == "placeholder"]


def test_small_codes_of_weights_are_kept():
    _, record = run_pass(RecastWeights(), fp8_program("tensorwise"))  # half the bytes that are worth it
    assert record.changes == 0
