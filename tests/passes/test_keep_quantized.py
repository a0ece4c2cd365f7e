"""keep-quantized: activations wait for the backward part as FP8 codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphopt
from graphopt.ir.decisions import Action
from graphopt.ir.fp8_padding import is_padding
from graphopt.ir.kept_values import forward_values
from graphopt.ir.liveness import saved_bytes, saved_for_backward
from graphopt.ir.twins import is_twin
from graphopt.operators.fp8 import DEQUANTIZE
from tests.support.fp8 import DYNAMIC, QUANTIZES, sqnr, to_16
from tests.support.kept_fp8 import (
    FP8,
    TOKENS,
    WIDE,
    WIDTH,
    Attention,
    Gated,
    Inside,
    Plain,
    Rectified,
    Sum,
    activations,
    gradients,
    inputs_of,
    joint,
    kept,
    kept_in_two_bytes,
    recipe,
    row,
)

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
    before = joint(Sum, chosen=chosen)
    after, record = kept(before, chosen)
    assert record.changes == 1 and kept_in_two_bytes(after) == []
    assert "codes of a product; read back for silu_backward" in row(after, "inner.up").reason
    assert saved_bytes(before) - saved_bytes(after) == TOKENS * WIDTH * 2  # the codes were kept before


@pytest.mark.parametrize(("saved", "name"), [("products", "rowwise"), ("all", "tensorwise")])
def test_a_relu_is_kept_as_codes_and_bits_and_its_backward_is_exact_beside_any_outlier(saved, name):
    chosen = recipe(saved, name)
    before = joint(Rectified, chosen=chosen)
    after, record = kept(before, chosen)
    assert record.changes == 1 and kept_in_two_bytes(after) == []
    assert "a bit an element for threshold_backward; exact" in row(after, "inner").reason
    assert saved_bytes(before) - saved_bytes(after) == TOKENS * WIDE * 2 - TOKENS * WIDE // 8
    inputs = inputs_of(before)
    position = next(i for i, entry in enumerate(before.signature.inputs) if entry.kind == "batch")
    inputs[position][0] *= 1e7  # beside it, all else has the code of zero
    assert all(torch.equal(*pair) for pair in zip(gradients(before, inputs), gradients(after, inputs), strict=True))


def test_a_relu_that_its_own_backward_alone_reads_is_kept_as_bits():
    before = joint(Rectified, lambda x: x.relu() + 1)
    after, _ = kept(before)
    (found,) = (each for each in after.decisions.with_action(Action.QUANTIZE) if "a bit an element" in each.reason)
    assert found.kept_bytes == TOKENS * WIDE // 8 and "codes" not in found.reason
    assert all(torch.equal(*pair) for pair in zip(gradients(before), gradients(after), strict=True))


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


class Odd(nn.Module):
    """A layer whose input has no multiple of 16 columns, and is read by a SiLU too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE + 8), nn.Linear(WIDE + 8, WIDTH)

    def forward(self, x):
        y = self.up(x)
        return self.down(y) + F.silu(y)[:, :WIDTH]


@pytest.mark.parametrize("saved", ["products", "all"])
def test_codes_that_products_pad_are_kept_without_the_zeros_and_read_by_others_too(saved):
    before = joint(Odd, chosen=recipe(saved), pad=to_16)
    after, _ = kept(before, recipe(saved))
    shapes = {tuple(value.base.meta["val"].shape): value.nbytes for value in activations(after)}
    assert (TOKENS, WIDE + 16) not in shapes and shapes[TOKENS, WIDE + 8] == TOKENS * (WIDE + 8)
    assert any("padded codes" in each.reason for each in after.decisions.with_action(Action.RECAST))


class Shared(nn.Module):
    """Three layers that read one value, whose columns are no multiple of 16; so does what ``function`` says."""

    def __init__(self, function):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE + 8)
        self.layers = nn.ModuleList(nn.Linear(WIDE + 8, WIDTH) for _ in range(3))
        self.function = function

    def forward(self, x):
        y, beside = self.function(self.up(x))
        first, second, third = (layer(y) for layer in self.layers)
        return first * second + third + beside


def alone(y):
    return y, 0


def silu_beside(y):
    return y, F.silu(y)[:, :WIDTH]


def rectified(y):
    return F.relu(y), 0


def paddings_again(program):
    return [node for node in program.ops() if is_padding(node) and is_twin(node)]


@pytest.mark.parametrize(("saved", "function"), [("none", alone), ("products", silu_beside), ("all", silu_beside)])
def test_codes_are_padded_again_once_for_all_readers(saved, function):
    before = joint(Shared, function, chosen=recipe(saved), pad=to_16)
    after, _ = kept(before, recipe(saved))
    (padded,) = paddings_again(after)
    assert len(padded.users) == 3
    (found,) = (each for each in after.decisions.with_action(Action.RECAST) if "padded codes" in each.reason)
    assert found.copies == 1 and "padded again where they are read; exact" in found.reason


@pytest.mark.parametrize("saved", ["products", "all"])
@pytest.mark.parametrize("function", [alone, rectified])
def test_padded_codes_that_nothing_else_can_stand_for_are_kept_and_nothing_beside_them(saved, function):
    before = joint(Shared, function, chosen=recipe(saved), pad=to_16)
    after, _ = kept(before, recipe(saved))
    assert not paddings_again(after)
    shapes = [tuple(value.base.meta["val"].shape) for value in activations(after)]
    assert shapes.count((TOKENS, WIDE + 16)) == 1 and (TOKENS, WIDE + 8) not in shapes
    bits = TOKENS * (WIDE + 8) // 8 if function is rectified else 0
    codes = TOKENS * (WIDE + 16) + 4  # with the scale
    assert codes + bits in [each.kept_bytes for each in after.decisions.with_action(Action.QUANTIZE)]
    if saved == "products":  # else products of two layers wait in FP8 too
        assert all(torch.equal(*pair) for pair in zip(gradients(before), gradients(after), strict=True))


def test_codes_that_products_pad_are_made_of_the_kept_value_again():
    before = joint(Odd, chosen=recipe("none"), pad=to_16)
    after, _ = kept(before, recipe("none"))
    assert not [value for value in activations(after) if value.base.meta["val"].dtype in FP8]
    assert all(torch.equal(*pair) for pair in zip(gradients(before), gradients(after), strict=True))


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


# ---- several users, layouts ------------------------------------------------------------------------------------------


def test_each_reader_of_a_value_reads_it_back_right_before_it_runs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.first(x)
            return self.second(y * F.silu(y)) * y

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
            return self.out((heads * F.silu(heads)).transpose(0, 1).reshape(TOKENS, width))

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
