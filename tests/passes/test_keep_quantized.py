"""keep-quantized: activations wait for the backward part as FP8 codes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.ir.decisions import Action
from graphopt.ir.kept_values import forward_values
from graphopt.ir.liveness import saved_bytes, saved_for_backward
from graphopt.ir.numeric import random_inputs
from graphopt.operators.fp8 import DEQUANTIZE
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.passes.keep_quantized import KeepQuantized
from graphopt.pipeline.pipeline import Pipeline
from tests.support.fp8 import DYNAMIC, QUANTIZES, joint_program, sqnr, tagged
from tests.support.graphs import run_pass

TOKENS, WIDTH, WIDE = 32, 64, 128
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Inside(nn.Module):
    """A layer, what is tested, and a head, so that the test is about neither an input nor the loss."""

    def __init__(self, inner: nn.Module, width: int = WIDTH):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, width), inner, nn.Linear(WIDTH, 16)

    def forward(self, x):
        return {"loss": self.head(self.inner(self.first(x))).float().square().mean()}


class Gated(nn.Module):
    def __init__(self, function=F.silu):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).view(2, 16, 4, 16).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(TOKENS, WIDTH))


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Plain(nn.Module):
    """Layers with nothing between them: all that the backward part reads are operands of products."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layers(x)


def recipe(saved="all", name="tensorwise", **options):
    return {"tensorwise": graphopt.fp8.Tensorwise, "rowwise": graphopt.fp8.Rowwise}[name](saved=saved, **options)


@functools.cache
def captured(kind, *options):
    torch.manual_seed(0)
    inner = kind(*options)
    return joint_program(Inside(inner, getattr(inner, "width", WIDTH)), {"x": torch.randn(TOKENS, WIDTH)})


def joint(kind, *options, chosen=None, layouts="one", roles=None):
    """The program before the pass: products of ``roles`` in FP8, between them what ``kind`` makes."""
    before = tagged(captured(kind, *options), roles=roles)
    return Pipeline((InsertQuantize(chosen or recipe(), layouts), DropDead())).run(before)


def kept(before, chosen=None):
    after, record = run_pass(KeepQuantized(chosen or recipe()), before, inputs=inputs_of(before))
    return Pipeline((DropDead(),)).run(after), record


def row(program, end):
    """The row about the value made in the module whose path ends so."""
    found = [each for each in program.decisions.rows if each.source.split(" | ")[0].endswith(end)]
    assert len(found) == 1, [each.source for each in program.decisions.rows]
    return found[0]


def kept_in_two_bytes(program):
    """Modules of the large values that wait in two bytes or more."""
    names = []
    for node in saved_for_backward(program):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype not in FP8 and value.nbytes >= 4096:
            names.append(program.origin(node).module)
    return names


def inputs_of(program):
    """Random numbers; weights as large as layers are initialised."""
    inputs = zip(random_inputs(program), program.signature.inputs, strict=True)
    return tuple(value / math.sqrt(WIDTH) if entry.kind == "param" else value for value, entry in inputs)


def activations(program):
    """What the forward part leaves that depends on the batch, scales left out."""
    varying = {
        node
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind == "batch"
    }
    for node in program.ops():
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return [v for v in forward_values(program) if v.uses and v.base in varying and v.nbytes >= TOKENS * WIDTH]


def gradients(program, inputs=None):
    return program.run(inputs or inputs_of(program))


# ---- fires -----------------------------------------------------------------------------------------------------------


def test_what_products_alone_read_is_kept_as_the_codes_they_read_and_nothing_changes():
    before = joint(Plain)
    after, record = kept(before)
    assert record.changes == 0 and kept_in_two_bytes(after) == []
    found = after.decisions.with_action(Action.QUANTIZE)
    assert len(found) == 4 and all("exact" in each.reason and each.kept_bytes < each.nbytes for each in found)


def test_values_between_products_are_kept_in_one_byte():
    before = joint(Gated)
    after, record = kept(before)
    assert record.changes == 3  # gate, its silu, up
    assert len(kept_in_two_bytes(before)) == 3 and kept_in_two_bytes(after) == []
    assert "scale for each 128" in row(after, "inner.gate").reason


def test_what_a_product_and_others_read_is_kept_as_the_codes_of_the_product():
    chosen = recipe("products")
    before = joint(Rectified, chosen=chosen)
    after, record = kept(before, chosen)
    assert record.changes == 1 and kept_in_two_bytes(after) == []
    assert "codes of a product; read back for threshold_backward" in row(after, "inner").reason
    assert saved_bytes(before) - saved_bytes(after) == TOKENS * WIDE * 2  # the codes were kept before


def test_products_alone_does_not_touch_what_no_product_reads():
    chosen = recipe("products")
    after, record = kept(joint(Gated, chosen=chosen), chosen)
    assert record.changes == 0 and sorted(kept_in_two_bytes(after)) == ["inner", "inner.gate", "inner.up"]
    assert "no product reads it in FP8" in row(after, "inner.gate").reason


@pytest.mark.parametrize(("inner", "name"), [(Attention, "tensorwise"), (Attention, "rowwise"), (Rectified, "rowwise")])
def test_nothing_in_fp8_means_that_values_are_quantized_again_and_that_is_exact(inner, name):
    chosen = recipe("none", name)
    before = joint(inner, chosen=chosen)
    after, record = kept(before, chosen)
    assert record.changes > 0 and not after.decisions.with_action(Action.QUANTIZE)
    assert not [value for value in activations(after) if value.base.meta["val"].dtype in FP8]
    assert all(torch.equal(*pair) for pair in zip(gradients(before), gradients(after), strict=True))


def test_a_float32_copy_is_made_again_from_the_value_in_two_bytes():
    class Wide(nn.Module):
        def forward(self, x):
            return (x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)

    after, _ = kept(joint(Wide))
    copies = after.decisions.with_action(Action.RECAST)
    assert len(copies) == 1 and "exact" in copies[0].reason
    assert not [
        n
        for n in saved_for_backward(after)
        if n.meta["val"].dtype is torch.float32 and n.meta["val"].dim() == 2 and n.meta["val"].shape == (TOKENS, WIDTH)
    ]


@pytest.mark.parametrize(("name", "layouts"), [("tensorwise", "two"), ("rowwise", "one"), ("rowwise", "two")])
@pytest.mark.parametrize("inner", [Attention, Rectified])
def test_never_two_copies_of_a_value_are_kept(inner, name, layouts):
    chosen = recipe("all", name)
    after, _ = kept(joint(inner, chosen=chosen, layouts=layouts), chosen)
    values = activations(after)
    late_codes = {value.base for value in values if value.base.meta["val"].dtype in FP8}
    for value in forward_values(after):
        calls = {user for holder in value.holders for user in holder.users if user.target in QUANTIZES}
        copies = [part for call in calls for part in call.users if part in late_codes]
        assert len(copies) + any(use.user.target not in QUANTIZES for use in value.uses) <= 1


# ---- must not fire ---------------------------------------------------------------------------------------------------


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
        ((Attention,), "through an exponential"),
        ((Attention,), "the difference of what comes of the two"),
    ],
    ids=["tanh", "sigmoid", "softmax", "dropout", "compared", "queries", "values"],
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


# ---- several users, layouts ------------------------------------------------------------------------------------------


def test_each_reader_of_a_value_reads_it_back_right_before_it_runs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.first(x)
            return self.second(y * y.abs()) * y

    after, _ = kept(joint(Twice))
    again = [node for node in after.ops() if node.target is DEQUANTIZE]
    assert len(again) >= 2 and all(node.next in node.users or node.next.next in node.users for node in again)
    assert all("again" in node.name for node in again)


@pytest.mark.parametrize("width", [64, 66])  # 66: no stretches of 128
def test_values_in_any_dense_layout_come_back_as_they_lay(width):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = width
            self.out = nn.Linear(width, WIDTH)

        def forward(self, x):
            heads = x.view(TOKENS // 8, 8, width).transpose(0, 1)  # not contiguous
            return self.out((heads * heads.abs()).transpose(0, 1).reshape(TOKENS, width))

    after, record = kept(joint(Turned))
    assert record.changes >= 1
    assert not [module for module in kept_in_two_bytes(after) if module]


def test_a_value_that_is_nan_or_infinite_makes_gradients_that_are_not_finite():
    before = joint(Gated)
    after, _ = kept(before)
    inputs = list(inputs_of(after))
    position = next(i for i, entry in enumerate(after.signature.inputs) if entry.kind == "batch")
    inputs[position][0, 0] = math.inf
    assert any(not torch.isfinite(value).all() for value in gradients(after, inputs) if torch.is_tensor(value))


# ---- numbers, memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [Gated, Rectified])
def test_the_loss_keeps_its_bits_and_gradients_their_accuracy(inner):
    before = joint(inner)
    after, _ = kept(before)
    expected, came = gradients(before), gradients(after)
    assert torch.equal(expected[0], came[0])
    # E4M3 rounds to 4 bits: an error of 2**-4 / sqrt(3) at most in the mean square, 29 dB. Two values stand in a row.
    assert min(sqnr(*pair) for pair in zip(expected[1:], came[1:], strict=True)) > 20


def test_bytes_in_the_rows_are_the_bytes_that_are_kept():
    before = joint(Gated)
    after, _ = kept(before)
    rows = [each for each in after.decisions.with_action(Action.QUANTIZE) if "scale for each" in each.reason]
    assert len(rows) == 3
    assert sum(each.nbytes - each.kept_bytes for each in rows) == saved_bytes(before) - saved_bytes(after)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "rowwise" else pytest.mark.slow) for n in DYNAMIC])
def test_the_report_and_explain_say_what_is_kept(name):
    step = graphopt.compile(
        Inside(Gated()),
        ["loss"],
        optimizer=graphopt.optim.SGD(lr=0.1),
        precision=graphopt.Precision(compute="fp8", fp8=graphopt.fp8.RECIPES[name](include=("inner.*", "first"))),
        backend="aten",
    )
    step(x=torch.randn(TOKENS, WIDTH))
    assert "kept as FP8" in step.explain("inner.gate")
    assert "quantize" in str(step.report()) and "kept as" in str(step.report())
