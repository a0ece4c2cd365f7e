"""release-gradients: updates move to where gradients are complete, and no further."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.build import training_program
from graphopt.capture.accumulation import append_window
from graphopt.capture.update import GRAD_NORM, UpdateRequest, window_update_program
from graphopt.capture.update_bucket import make_bucket
from graphopt.execute.executable import build_executable
from graphopt.ir import ops
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program
from graphopt.ir.spec import Output, OutputKind, TensorSpec
from graphopt.ir.storage import storage_map
from graphopt.ir.updates import update_groups
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.release_gradients import ReleaseGradients
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline
from graphopt.report.step_report import measure_executable
from tests.support.graphs import run_pass
from tests.support.models import tiny_model
from tests.support.steps import step_program, two_layers

FLOAT_BYTES = 4
# A Python number among tensors becomes, while its operator runs, a double and a number of the operand's dtype.
NUMBER_BYTES = 8 + FLOAT_BYTES
aten = torch.ops.aten


def released(program: Program) -> Program:
    """The program after what runs before the pass, and the pass."""
    return Pipeline((Dedupe(), DropDead(), ReleaseGradients())).run(program)


def position_of(program: Program) -> dict[str, int]:
    return {node.name: i for i, node in enumerate(program.ops())}


def peak_in_place(program: Program) -> int:
    return plan_memory(Pipeline((ReuseLastUse(),)).run(program)).peak_bytes


class Stack(nn.Module):
    """Equal square layers without biases."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean()}


class Shared(nn.Module):
    """One layer that runs twice: its old weight is read after a part of its gradient exists."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": self.inner(self.inner(x).tanh()).square().mean()}


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return {"loss": nn.functional.cross_entropy(self.head(self.body(self.embed(x)).tanh()), x)}


class Normed(nn.Module):
    """Buffers that are written, a frozen layer, a parameter without a gradient path of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return {"loss": (self.frozen(self.norm(self.first(x))) * self.scale).square().mean()}


def make_case(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "tied":
        return Tied(), torch.randint(0, 11, (6,))
    model = {"stack": Stack(3, 8), "shared": Shared(), "normed": Normed()}[name]
    return model, torch.randn(6, 8)


# ---- fires ---------------------------------------------------------------------------------------------------------


def test_each_update_follows_its_gradient():
    program = step_program(*two_layers(), clip=False)
    after, record = run_pass(ReleaseGradients(), program)
    position, order = position_of(after), after.ops()
    ends = [max(position[node.name] for node in group.ops) for group in update_groups(after)]
    # The gradients of the first layer come last, and one of them last of all: its update moves behind nothing.
    assert record.changes == len(ends) - 1
    first = min(position[node.name] for group in update_groups(after) for node in group.ops)
    assert any(ops.is_matmul(node) for node in order[first:]), "no backward is left behind the first update"


def test_predicted_peak_falls_by_the_gradients_that_lived_together():
    model = Stack(depth=6, width=32)
    before = step_program(model, {"x": torch.randn(2, 32)}, clip=False, optimizer=optim.SGD(lr=0.1))
    after = released(before)
    layer_bytes = 32 * 32 * FLOAT_BYTES
    kept, freed = peak_in_place(before), peak_in_place(after)
    assert 6 * layer_bytes <= kept < 7 * layer_bytes
    assert layer_bytes <= freed < 2 * layer_bytes


def test_rows_say_what_is_released():
    after = released(step_program(*two_layers(), clip=False))
    rows = after.decisions.with_action(Action.RELEASE)
    weight = next(row for row in rows if "body.0.weight" in row.reason)
    assert len(rows) == 4 and weight.nbytes == 16 * 32 * FLOAT_BYTES
    assert weight.value in {node.name for node in after.ops()} and "body.0" in weight.source


def test_numbers_that_updates_share_come_before_the_first_of_them():
    after = released(step_program(*two_layers(), clip=False))
    position = position_of(after)
    for node in after.ops():
        assert all(
            position[argument.name] < position[node.name]
            for argument in ops.tensor_arguments(node)
            if argument.op == "call_function"
        )


# ---- no further than it may ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shared", "tied", "stack"])
def test_an_update_waits_for_the_last_reader_of_the_old_value(name):
    model, x = make_case(name)
    after = released(step_program(model, {"x": x}, clip=False))
    storages, position = storage_map(after), position_of(after)
    for group in update_groups(after):
        written = {number for target in group.targets for number in storages.held[target]}
        readers = [
            position[node.name]
            for node in after.ops()
            if node not in group.ops
            if any(not written.isdisjoint(storages.held[argument]) for argument in node.all_input_nodes)
        ]
        assert max(readers) < min(position[node.name] for node in group.ops if not ops.is_scalar_op(node))


@pytest.mark.parametrize("name", ["shared", "tied", "stack"])
def test_every_parameter_is_still_written_where_it_lies(name):
    model, x = make_case(name)
    after = Pipeline((ReuseLastUse(),)).run(released(step_program(model, {"x": x}, clip=False)))
    plan = plan_memory(after)
    assert not any(plan.write_after) and not plan.write_at_end


# ---- must not fire -------------------------------------------------------------------------------------------------


def test_clipping_keeps_every_gradient_and_computes_each_norm_behind_it():
    before = Pipeline((Dedupe(), DropDead())).run(step_program(*two_layers(), clip=True))
    after, record = run_pass(ReleaseGradients(), before)
    names = [node.name for node in after.ops()]
    groups = update_groups(after)
    norms = [node for node in after.ops() if ops.is_call(node, aten.linalg_vector_norm.default)][:-1]
    assert [names[names.index(norm.name) - 1] for norm in norms] == [norm.args[0].name for norm in norms]
    assert len(after.decisions.with_action(Action.KEEP)) == len(record.refusals) == len(groups) == 4
    assert all("several gradients" in refusal.reason for refusal in record.refusals)
    total = names.index(after.output_named(GRAD_NORM).name)
    assert all(names.index(node.name) > total for group in groups for node in group.ops if not ops.is_scalar_op(node))


def test_a_gradient_that_is_returned_is_kept():
    before = step_program(*two_layers(), clip=False)
    gradient = update_groups(before)[0].gradients[0]
    returned = Output("gradient", OutputKind.USER, before.spec(gradient))
    before.set_outputs([*before.output_values(), gradient], [*before.signature.outputs, returned])
    after, record = run_pass(ReleaseGradients(), before)
    assert [refusal.reason for refusal in record.refusals] == ["it is an output"]
    assert after.decisions.of(gradient.name).action is Action.KEEP


def test_what_writes_in_place_is_left_alone():
    in_place = Pipeline((ReuseLastUse(),)).run(step_program(*two_layers(), clip=False))
    program = in_place.copy()
    assert ReleaseGradients().apply(program).count == 0
    assert program.text() == in_place.text()


def test_a_program_without_an_update_is_left_alone():
    model, batch = two_layers()
    program = training_program(model, batch, outputs=["loss"])
    assert ReleaseGradients().apply(program).count == 0 and not program.decisions.rows


def _window_specs() -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(parameter) for name, parameter in two_layers()[0].named_parameters()}


@pytest.mark.parametrize("clip", [True, False])
def test_the_end_of_a_window_has_its_updates_one_by_one_already(clip):
    optimizer, specs = optim.AdamW(lr=0.1), _window_specs()
    bucket = make_bucket(optimizer, optimizer.options(), name="0", parameters=tuple(specs))
    program = window_update_program(specs, UpdateRequest(optimizer, (bucket,), clip=clip), divide=True)
    after, record = run_pass(ReleaseGradients(), program)
    assert record.changes == 0
    largest = max(spec.nbytes for spec in specs.values())
    # Each parameter needs its scaled gradient, then the root: one at a time (and a few numbers for clipping).
    assert largest <= peak_in_place(after) < largest + 64


def test_a_micro_step_adds_to_its_window_at_once_already():
    model, batch = two_layers()
    program = append_window(training_program(model, batch, outputs=["loss"]), loss="loss", weight=1.0)
    after, record = run_pass(ReleaseGradients(), program)
    assert record.changes == 0
    assert len(after.decisions.with_action(Action.RELEASE)) == 4


# ---- numbers -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1),
    "nesterov": optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": optim.Adam(lr=0.1, weight_decay=0.01),
    "adamw": optim.AdamW(lr=0.1),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["stack", "shared", "tied", "normed"])
def test_three_steps_are_bit_equal_with_and_without(name, optimizer, clip):
    model, x = make_case(name)
    twin = copy.deepcopy(model)
    options = {"outputs": ["loss"], "optimizer": OPTIMIZERS[optimizer], "clip_grad_norm": clip}
    step = graphopt.compile(model, **options, verify="numeric")
    plain = graphopt.compile(twin, **options, release_gradients=False)
    for _ in range(3):
        assert torch.equal(step(x).loss, plain(x).loss)
    for (key, value), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(value, expected), key
    for mine, its in zip(step.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(its[key])) for key in its)


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "cnn", "mlp"])
def test_predicted_peak_is_measured_and_higher_by_one_temporary_at_most(name):
    """An update may run while all activations are alive: its temporary, as large as its parameter, adds to them."""
    tiny = tiny_model(name)
    reports = []
    for release in (True, False):
        step = graphopt.compile(
            copy.deepcopy(tiny.model), outputs=["loss"], optimizer=optim.AdamW(), release_gradients=release
        )
        step(**tiny.batch)
        reports.append(step.report(measure=True))
    on, off = reports
    assert 0 <= on.measured_peak_bytes - on.predicted_peak_bytes <= NUMBER_BYTES
    largest_bytes = max(parameter.nbytes for parameter in tiny.model.parameters())
    assert on.predicted_peak_bytes <= off.predicted_peak_bytes + largest_bytes


def test_measured_peak_falls_by_the_gradients_that_lived_together():
    depth, width = 8, 64
    before = step_program(Stack(depth, width), {"x": torch.randn(2, width)}, clip=False)
    layer_bytes = width * width * FLOAT_BYTES
    # Activations (2 x 64 each) and numbers are alive beside the one gradient; beside all of them, nothing else is.
    beside_bytes = (depth + 2) * 2 * width * FLOAT_BYTES + 64
    peaks = []
    for passes in ((Dedupe(), DropDead(), ReuseLastUse()), (Dedupe(), DropDead(), ReleaseGradients(), ReuseLastUse())):
        executable = build_executable(Pipeline(passes).run(before), title="test")
        measured = measure_executable(executable).peak_bytes
        assert 0 <= measured - executable.plan.peak_bytes <= NUMBER_BYTES
        peaks.append(executable.plan.peak_bytes)
    together, one_by_one = peaks
    assert depth * layer_bytes <= together <= depth * layer_bytes + beside_bytes
    assert layer_bytes <= one_by_one <= layer_bytes + beside_bytes


def test_the_table_says_what_waiting_for_the_norm_costs():
    step = graphopt.compile(
        Stack(4, 16), outputs=["loss"], optimizer=optim.SGD(lr=0.1), clip_grad_norm=1.0, backend="aten"
    )
    step(torch.randn(2, 16))
    kept = step.program.decisions.with_action(Action.KEEP)
    (note,) = [note for note in step.program.decisions.notes if "second backward" in note]
    assert len(kept) == 4 and "keeping them is what is done" in note
    assert "second backward" in str(step.report())
