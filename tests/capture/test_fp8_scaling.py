"""What a joint program is given if it quantizes to FP8: names, histories, evidence, and weights apart."""

from __future__ import annotations

import operator
from functools import cache

import pytest
import torch
from torch import nn

from graphopt import fp8
from graphopt.capture.fp8_scaling import watch_module, watch_step
from graphopt.capture.fp8_tensors import quantized_tensors
from graphopt.capture.window_weights import split_weights
from graphopt.ir.fp8_watch import (
    FP8_AMAX,
    FP8_AMAX_BACKWARD,
    FP8_EVIDENCE,
    HELD_WEIGHT,
    HISTORY,
    SCALES,
    WEIGHT_HISTORY,
)
from graphopt.ir.numeric import random_inputs
from graphopt.ir.spec import InputKind, OutputKind
from graphopt.ir.widening import before_widening
from graphopt.operators.fp8 import QUANTIZE, QUANTIZE_BOTH, QUANTIZE_DELAYED_BOTH, QUANTIZE_TRANSPOSED
from graphopt.passes.insert_quantize import InsertQuantize
from tests.support.fp8 import joint_program, tagged

DELAYED = fp8.Delayed(history=3)
FULL_LIKE = torch.ops.aten.full_like.default
TO_COPY = torch.ops.aten._to_copy.default
LISTS_READ_AS_ONE = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)


class Normed(nn.Module):
    """Gradients in two dtypes: autocast leaves the norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.down(self.norm(self.up(x))).float().square().mean()}


class Shared(nn.Module):
    """``body`` runs twice, ``head`` once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(torch.tanh(self.body(torch.tanh(self.body(x))))).square().mean()}


@cache
def _joint():
    return joint_program(Shared(), {"x": torch.randn(16, 16)})


def joint(recipe):
    """Forward and backward of Shared, all products in FP8."""
    program = tagged(_joint())
    InsertQuantize(recipe).apply(program)
    return program


def named_outputs(program, inputs):
    values = program.run(inputs)
    return {
        (str(output.kind), output.name): value for output, value in zip(program.signature.outputs, values, strict=True)
    }


def test_tensors_are_called_after_module_and_role():
    tensors = quantized_tensors(joint("tensorwise"))
    assert {tensor.name for tensor in tensors} == {
        "body.weight",
        "head.weight",
        "body.input",
        "body.input#2",
        "head.input",
        "head.gradient",
        "body.gradient",
        "body.gradient#2",
    }


def test_watching_adds_outputs_and_changes_no_number():
    before = joint("rowwise")
    after = watch_step(before, fp8.Rowwise())
    inputs = random_inputs(before)
    wanted, found = named_outputs(before, inputs), named_outputs(after, inputs)
    assert all(torch.equal(found.pop(name), value) for name, value in wanted.items())
    assert set(found) == {("user", FP8_AMAX), ("user", FP8_EVIDENCE)}
    assert found["user", FP8_EVIDENCE] == 0 and found["user", FP8_AMAX].shape == (8,)


def test_a_program_that_quantizes_nothing_stays_as_it_is():
    for watch in (watch_step, watch_module):
        after = watch(_joint(), DELAYED)
        assert after.text() == _joint().text() and not after.fp8.watch.reported
    assert split_weights(watch_step(_joint(), DELAYED)) is None


def test_the_evidence_is_nan_for_one_bad_element():
    program = watch_step(joint("rowwise"), fp8.Rowwise())
    inputs = list(random_inputs(program))
    position = program.signature.input_index("x", InputKind.BATCH)
    inputs[position][7, 3] = -torch.inf
    found = named_outputs(program, inputs)
    assert found["user", FP8_EVIDENCE].isnan()
    amax = dict(zip(program.fp8.watch.reported, found["user", FP8_AMAX].isfinite().tolist(), strict=True))
    assert amax["body.weight"] and amax["head.weight"] and not amax["body.input"]


@pytest.mark.parametrize(("value", "is_finite"), [(3e38, True), (-torch.inf, False), (torch.nan, False)])
def test_a_gradient_that_no_product_reads_is_evidence_too(value, is_finite):
    before = joint("tensorwise")
    values, outputs = list(before.output_values()), before.signature.outputs
    position = next(i for i, output in before.signature.outputs_of(OutputKind.GRAD) if output.name == "head.bias")
    values[position] = before.insert_before(values[position].next, FULL_LIKE, values[position], value)
    before.set_outputs(values, outputs)
    program = watch_step(before, fp8.Tensorwise(), gradients=True)
    watch, found = program.fp8.watch, named_outputs(program, random_inputs(program))
    assert bool(found["user", FP8_EVIDENCE] == 0) == is_finite
    amax = dict(zip((*watch.reported, *watch.gradients), found["user", FP8_AMAX].isfinite().tolist(), strict=True))
    assert [name for name, is_good in amax.items() if not is_good] == ([] if is_finite else ["head.bias"])
    assert set(watch.gradients) == {"body.weight", "body.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("bad", ["up.weight", "norm.bias", None])
def test_gradients_of_several_dtypes_are_looked_at_dtype_by_dtype(bad):
    before = tagged(joint_program(Normed(), {"x": torch.randn(16, 16)}))
    InsertQuantize("tensorwise").apply(before)
    values, outputs = list(before.output_values()), before.signature.outputs
    for position, output in before.signature.outputs_of(OutputKind.GRAD):
        if output.name == bad:
            source = before_widening(before, values[position])
            wrong = before.insert_before(source.next, FULL_LIKE, source, torch.inf)
            values[position] = before.insert_before(wrong.next, TO_COPY, wrong, dtype=torch.float32)
    before.set_outputs(values, outputs)
    program = watch_step(before, fp8.Tensorwise(), gradients=True)
    lists = [node.args[0] for node in program.ops() if node.target in LISTS_READ_AS_ONE]
    assert all(len({program.spec(value).dtype for value in values}) == 1 for values in lists)
    watch, found = program.fp8.watch, named_outputs(program, random_inputs(program))
    amax = dict(zip((*watch.reported, *watch.gradients), found["user", FP8_AMAX].isfinite().tolist(), strict=True))
    assert len(watch.gradients) == 6 and [name for name, is_good in amax.items() if not is_good] == [bad] * bool(bad)
    assert bool(found["user", FP8_EVIDENCE] == 0) == (bad is None)


def in_both_layouts(program):
    """Let the readers of each tensor's codes read, in turn, each copy that three forms of quantizing make of it."""
    emit, view = program.insert_before, torch.ops.aten.t.default
    for node in [node for node in program.ops() if node.target is QUANTIZE]:
        x, format, grid, power_of_two = node.args
        both = emit(node, QUANTIZE_BOTH, x, format, grid, grid, power_of_two)
        turned = emit(node, QUANTIZE_TRANSPOSED, x, format, grid, power_of_two)
        codes, scale, from_both = (emit(node, operator.getitem, both, i) for i in range(3))
        copies = [codes, emit(node, view, from_both), emit(node, view, emit(node, operator.getitem, turned, 0))]
        for old in list(node.users):
            for i, reader in enumerate(list(old.users)):
                reader.replace_input_with(old, scale if old.args[1] else copies[i % 3])
    program.graph.eliminate_dead_code()
    return program


def test_all_quantizers_of_a_tensor_share_its_row_and_its_scale():
    plain, several = joint("delayed"), in_both_layouts(joint("delayed"))
    plain, several = watch_step(plain, DELAYED), watch_step(several, DELAYED)
    assert several.fp8.watch == plain.fp8.watch
    assert any(node.target is QUANTIZE_DELAYED_BOTH for node in several.ops())
    inputs = random_inputs(plain)
    wanted, found = named_outputs(plain, inputs), named_outputs(several, inputs)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_an_empty_history_means_the_scale_of_present_values():
    present, delayed = watch_step(joint("tensorwise"), fp8.Tensorwise()), watch_step(joint("delayed"), DELAYED)
    inputs = {entry.name: value for entry, value in zip(delayed.signature.inputs, random_inputs(delayed), strict=True)}
    inputs[HISTORY].zero_()
    inputs[WEIGHT_HISTORY].zero_()
    wanted = named_outputs(present, [inputs[entry.name] for entry in present.signature.inputs])
    found = named_outputs(delayed, list(inputs.values()))
    assert all(torch.equal(found[name], value) for name, value in wanted.items() if name[0] != "user")


def test_weights_apart_give_the_numbers_of_the_whole():
    for recipe in (fp8.Rowwise(), DELAYED):
        whole = watch_step(joint(recipe.name), recipe)
        split = split_weights(whole)
        inputs = {entry.name: value for entry, value in zip(whole.signature.inputs, random_inputs(whole), strict=True)}
        wanted = named_outputs(whole, list(inputs.values()))
        held = named_outputs(split.weights, [inputs[entry.name] for entry in split.weights.signature.inputs])
        inputs |= {name: value for (_, name), value in held.items()}
        found = named_outputs(split.joint, [inputs[entry.name] for entry in split.joint.signature.inputs])
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        kinds = {entry.kind for entry in split.weights.signature.inputs}
        assert kinds <= {InputKind.PARAM, InputKind.STATE}
        names = [entry.name for _, entry in split.joint.signature.inputs_of(InputKind.STATE)]
        assert WEIGHT_HISTORY not in names and any(name.startswith(HELD_WEIGHT) for name in names)


def test_a_module_reports_each_part_by_itself():
    program = watch_module(joint("delayed"), DELAYED)
    inputs = {entry.name: value for entry, value in zip(program.signature.inputs, random_inputs(program), strict=True)}
    assert inputs[SCALES].shape == (8,)
    found = named_outputs(program, list(inputs.values()))
    assert (found["user", FP8_AMAX].numel(), found["user", FP8_AMAX_BACKWARD].numel()) == (5, 3)
    assert all(name.rpartition(".")[2].startswith("gradient") for name in program.fp8.watch.delayed[5:])
