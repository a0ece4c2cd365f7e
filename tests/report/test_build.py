"""The report: classes add up, lifetimes agree with the plan, gradients are found however they are used."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from graphopt.build import training_program
from graphopt.capture.accumulation import append_window
from graphopt.capture.loss_weight import find_loss_weight
from graphopt.execute.executable import Executable, build_executable
from graphopt.execute.measure import MemoryTrace
from graphopt.execute.segments import split_segments
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Stage
from graphopt.ir.storage import storage_map
from graphopt.optim import SGD, Adam, AdamW, Optimizer
from graphopt.pipeline.default import default_pipeline
from graphopt.report.build import build_report
from graphopt.report.classify import Classifier
from graphopt.report.data import MemoryClass
from graphopt.report.gradients import parameter_gradients
from graphopt.report.lifetimes import storage_lifetimes
from tests.support.steps import step_executable, two_layers

PARAMETERS = {"body.0.weight": (32, 16), "body.0.bias": (32,), "head.weight": (4, 32), "head.bias": (4,)}
PARAMETER_BYTES = 4 * (32 * 16 + 32 + 4 * 32 + 4)


def executable_of(kind: str) -> Executable:
    """The step, or parts of it, of ``two_layers``."""
    if kind in ("step", "functional step"):
        return step_executable(in_place=kind == "step")
    program = training_program(*two_layers(), outputs=["loss"])
    if kind == "micro step":
        program = append_window(program, loss="loss", weight=find_loss_weight(program, "loss").weight)
    else:
        program.stage = Stage.STEP
    return build_executable(default_pipeline(Stage.STEP).run(program), title="test")


KINDS = ["step", "functional step", "micro step", "forward-backward"]


@pytest.mark.parametrize("kind", KINDS)
def test_classes_add_up_to_the_peak_and_what_is_resident(kind: str):
    executable = executable_of(kind)
    report = build_report(executable)
    assert report.memory.total == report.predicted_peak_bytes + report.resident_bytes
    assert report.predicted_peak_bytes == executable.plan.peak_bytes
    assert all(nbytes >= 0 for _, nbytes in report.memory.items())


@pytest.mark.parametrize("kind", KINDS)
def test_lifetimes_give_the_live_bytes_of_the_plan_at_every_operator(kind: str):
    program = executable_of(kind).program
    plan, storages = plan_memory(program), storage_map(program)
    lifetimes = storage_lifetimes(plan, storages)
    for position, live_bytes in enumerate(plan.live_bytes):
        alive = [number for number, lifetime in lifetimes.items() if lifetime.is_alive_at(position)]
        assert sum(storages.nbytes[number] for number in alive) == live_bytes


def test_resident_memory_is_split_by_kind_of_input():
    memory = build_report(step_executable()).memory
    assert memory.parameters == PARAMETER_BYTES
    assert memory.optimizer_state == 2 * PARAMETER_BYTES
    assert memory.batch == 4 * (8 * 16 + 8 * 4) + 4  # x, target and the tangent
    assert (memory.buffers, memory.constants) == (0, 0)


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), Adam(weight_decay=0.1), AdamW()], ids=str
)
@pytest.mark.parametrize("in_place", [False, True])
def test_finds_the_gradient_of_every_parameter(optimizer: Optimizer, in_place: bool):
    program = step_executable(optimizer=optimizer, in_place=in_place).program
    found = parameter_gradients(program)
    assert {name: tuple(program.spec(values[-1]).shape) for name, values in found.items()} == PARAMETERS
    assert all("grad" in str(program.origin(values[-1])) for values in found.values())


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_are_a_class_at_the_start_of_the_update(in_place: bool):
    executable = step_executable(in_place=in_place)
    plan, storages = executable.plan, storage_map(executable.program)
    classifier = Classifier(executable.program, plan, storages)
    # The last norm is that of all norms; each gradient's own stands right behind it.
    norm = max(i for i, node in enumerate(plan.order) if "linalg_vector_norm" in str(node.target))
    gradients = [
        number for number in classifier.alive_at(norm) if classifier.memory_class(number, norm) is MemoryClass.GRADIENTS
    ]
    assert sum(storages.nbytes[number] for number in gradients) == PARAMETER_BYTES


def test_memory_that_is_written_in_place_is_known_by_what_lies_in_it():
    executable = step_executable()
    plan, storages = executable.plan, storage_map(executable.program)
    classifier = Classifier(executable.program, plan, storages)
    position = {node.name: i for i, node in enumerate(plan.order)}
    number = storages.held[plan.order[position["tanh"]]][0]
    assert classifier.content(number, position["addmm"]).name == "addmm"
    assert classifier.content(number, position["tanh"] + 1).name == "tanh"
    assert classifier.memory_class(number, position["tanh"]) is MemoryClass.ACTIVATIONS
    overwritten = next(node for node in plan.order if "tanh_backward" in str(node.target))
    assert (
        classifier.memory_class(storages.held[overwritten][0], position[overwritten.name])
        is not MemoryClass.ACTIVATIONS
    )


def test_the_accumulation_window_counts_as_gradients():
    report = build_report(executable_of("micro step"))
    assert report.memory.gradients >= PARAMETER_BYTES
    assert report.memory.optimizer_state == 2 * 8  # weight and loss of the window, float64


def test_activations_are_what_forward_leaves_for_backward():
    executable = executable_of("forward-backward")
    plan, storages = executable.plan, storage_map(executable.program)
    classifier = Classifier(executable.program, plan, storages)
    start = next(part.start for part in split_segments(executable.program) if part.name == "backward")
    found = {
        classifier.content(number, start).name
        for number in classifier.alive_at(start)
        if classifier.memory_class(number, start) is MemoryClass.ACTIVATIONS
    }
    assert found == {"tanh", "sub", "mean"}  # mean is the loss: it is returned, so it lives to the end


def test_the_timeline_has_a_point_for_each_operator_in_three_segments():
    executable = step_executable()
    report = build_report(executable)
    assert [point.op for point in report.timeline] == [node.name for node in executable.plan.order]
    assert list(dict.fromkeys(point.segment for point in report.timeline)) == ["forward", "backward", "update"]
    assert report.peak is not None and report.peak.live_bytes == report.predicted_peak_bytes


def test_the_largest_values_are_sorted_and_alive_at_the_peak():
    report = build_report(step_executable())
    sizes = [value.nbytes for value in report.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= report.predicted_peak_bytes


def test_measured_memory_is_reported_beside_the_prediction():
    assert build_report(step_executable()).measured_peak_bytes is None
    report = build_report(step_executable(), measured=MemoryTrace((10, 5), 10, 5))
    assert report.measured_peak_bytes == 10
    assert "measured 10 B" in str(report)


def test_the_text_shows_passes_classes_and_notes():
    text = str(build_report(step_executable(), notes=("[bold]look[/bold]",)))
    assert "reuse-last-use" in text and "optimizer state" in text
    assert "backend aten (asked for)" in text
    assert "note: [bold]look[/bold]" in text


def test_the_report_is_json():
    report = build_report(step_executable(), notes=("x",))
    loaded = json.loads(json.dumps(report.as_dict()))
    assert loaded["memory"]["parameters"] == PARAMETER_BYTES
    assert len(loaded["timeline"]) == len(report.timeline)


def test_a_program_without_operators_has_a_report():
    class Identity(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    import graphopt

    program = graphopt.capture(Identity(), (torch.randn(3),))
    program = graphopt.optimize(program)
    report = build_report(build_executable(program, title="identity"))
    assert report.memory.total == report.predicted_peak_bytes + report.resident_bytes
    assert "identity" not in report.title and str(report)
