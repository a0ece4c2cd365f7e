"""The update of a scaled loss as a graph: what it adds, what waits for what, what is selected."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import graphopt
from graphopt import LossScale, optim
from graphopt.capture.appender import Appender
from graphopt.capture.loss_scaling import LOSS_SCALE, OVERFLOW, ScalingWriter
from graphopt.capture.update import _empty_program, _takes_factor
from graphopt.execute.segments import split_segments
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import plan_memory
from graphopt.ir.numeric import random_inputs
from graphopt.ir.spec import InputKind, OutputKind, TensorSpec
from tests.support.steps import TwoLayers

aten = torch.ops.aten


def scaled_step(*, decides="host", clip=None, scale=True, model=None, optimizer=None, **options):
    torch.manual_seed(0)
    step = graphopt.compile(
        model or TwoLayers(),
        outputs=["loss"],
        optimizer=optimizer or optim.SGD(lr=0.1),
        clip_grad_norm=clip,
        loss_scale=LossScale(decides=decides) if scale else None,
        backend="aten",
        **options,
    )
    step(x=torch.randn(8, 16), target=torch.randn(8, 4))
    return step


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test_no_parameter_is_written_before_all_gradients_have_been_looked_at(clip, make):
    step = scaled_step(clip=clip, optimizer=make(lr=0.1))
    program = step.program
    plan = plan_memory(program)
    segments = {segment.name: segment for segment in split_segments(program, plan)}
    order = list(plan.order)
    assert order.index(program.output_named(OVERFLOW)) < segments["update"].start
    assert all(order.index(node) < segments["update"].start for node in order if node.target is aten.amax.default)


def test_gradients_are_not_released_early_and_the_report_says_why():
    refusals = [
        refusal.reason
        for record in scaled_step().program.history
        if record.name == "release-gradients"
        for refusal in record.refusals
    ]
    assert len(refusals) == 4 and all("computed from several gradients" in reason for reason in refusals)
    released = [record for record in scaled_step(scale=False).program.history if record.name == "release-gradients"]
    assert not released[0].refusals


@pytest.mark.parametrize(("precision", "scale"), [("fp16", True), ("bf16", True), ("fp8", False)])
def test_gradients_that_wait_for_each_other_wait_as_they_were_computed(precision, scale):
    model = TwoLayers()
    kept = scaled_step(model=model, precision=precision, scale=scale).program.decisions.with_action(Action.KEEP)
    assert sum(row.nbytes for row in kept) == 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("largest", [(torch.bfloat16, -3e38), (torch.float32, 1e5), (torch.bfloat16, torch.nan)])
@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.bfloat16, torch.float32, torch.float64]])
def test_gradients_of_several_dtypes_are_stacked_dtype_by_dtype(dtypes, largest):
    gradients = [torch.tensor([dtype.itemsize, -1.0], dtype=dtype) for dtype in 2 * dtypes]
    dtype, extreme = largest
    gradients.append(torch.tensor([0.0, extreme], dtype=dtype))
    program = _empty_program()
    appender = Appender(program)
    specs = [TensorSpec((2,), gradient.dtype, (1,), gradient.device) for gradient in gradients]
    nodes = [appender.add_tensor(f"grad{i}", InputKind.STATE, spec) for i, spec in enumerate(specs)]
    measured = ScalingWriter(program, appender.emit).measure(nodes, nodes[0])
    appender.add_output(measured.largest, OutputKind.USER, "largest")
    stacks = [node.args[0] for node in program.ops() if node.target is aten.stack.default]
    assert stacks and all(len({program.spec(value).dtype for value in values}) == 1 for values in stacks)
    (found,) = program.run(gradients)
    wanted = torch.cat(gradients).abs().amax()  # of several dtypes: in the widest
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, check_dtype=False)


def test_forward_and_backward_are_those_of_the_unscaled_loss():
    def until_update(step):
        looked_at = [i for i, node in enumerate(step.program.ops()) if node.target is aten.amax.default]
        end = looked_at[0] if looked_at else len(step.program.ops())
        return [str(node.target) for node in step.program.ops()[:end]]

    plain, scaled = (until_update(scaled_step(scale=scale, release_gradients=False)) for scale in (False, True))
    assert scaled == plain[: len(scaled)] and len(scaled) > 8


@pytest.mark.parametrize("clip", [None, 1.0])
def test_new_values_are_selected_one_by_one(clip):
    """Deciding in the program holds the new state of one parameter more, not of all."""
    peaks = {}
    for decides in ("host", "device"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        step = graphopt.compile(
            model,
            outputs=["loss"],
            loss=lambda output, batch: output.square().mean(),
            optimizer=optim.AdamW(),
            clip_grad_norm=clip,
            loss_scale=LossScale(decides=decides),
            backend="aten",
        )
        step(torch.randn(4, 64))
        peaks[decides] = step.report().predicted_peak_bytes
    assert peaks["device"] - peaks["host"] <= 3 * 64 * 64 * 4 + 1024


def test_planned_memory_is_what_is_measured():
    for decides in ("host", "device"):
        report = scaled_step(decides=decides, clip=1.0, optimizer=optim.AdamW()).report(measure=True)
        assert report.predicted_peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.01)


@pytest.mark.parametrize("decides", ["host", "device"])
def test_the_scale_is_state_and_no_constant(decides):
    step = scaled_step(decides=decides)
    kinds = {entry.name: entry.kind for entry in step.program.signature.inputs}
    assert kinds[LOSS_SCALE] is InputKind.STATE
    written = {output.name for _, output in step.program.signature.outputs_of(OutputKind.STATE_UPDATE)}
    assert (LOSS_SCALE in written) == (decides == "device")
    for _ in range(3):
        step(x=torch.full((8, 16), float("inf")), target=torch.zeros(8, 4))
    assert step.last_update.skipped and step.loss_scale == 2.0**13
    assert len(step.steps.built) == 1


@pytest.mark.parametrize("verify", ["infer", "numeric"])
def test_every_pass_keeps_the_numbers_of_a_deciding_update(verify):
    step = scaled_step(decides="device", clip=1.0, optimizer=optim.AdamW(), verify=verify)
    assert step.last_update.skipped is None


def test_complex_and_empty_gradients_are_looked_at():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.none = nn.Parameter(torch.ones(0))

        def forward(self, x, target):
            return {"loss": (x[0, :2] * self.turn).abs().square().sum() + self.none.sum()}

    step = scaled_step(model=Odd())
    assert step.last_update.skipped is None
    before = step.model.turn.detach().clone()
    step(x=torch.full((8, 16), float("inf")), target=torch.zeros(8, 4))
    assert step.last_update.skipped and torch.equal(before, step.model.turn.detach())


def test_operators_that_take_the_factor_select_by_themselves():
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    with torch.library._scoped_library("scaling_test", "FRAGMENT") as library:
        library.define("update(Tensor p, Tensor? factor) -> (Tensor, Tensor)")
        fused = graph.call_function(torch.ops.scaling_test.update.default, (value, value))
    assert _takes_factor(graph.call_function(operator.getitem, (fused, 0)))
    assert not _takes_factor(graph.call_function(aten.add.Tensor, (value, value)))
    assert not _takes_factor(value)


def test_random_numbers_for_a_check_include_a_usable_scale():
    """Checks by numbers sample the state; a scale of 0 would make every update NaN, and hide differences."""
    program = scaled_step(decides="device").program
    position = program.signature.input_index(LOSS_SCALE, InputKind.STATE)
    assert position is not None
    assert float(random_inputs(program)[position]) != 0.0
