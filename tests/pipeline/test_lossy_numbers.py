"""The numeric check of lossy passes: what a deep model makes of a rounding is no mistake, a wrong call is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import fx, nn

from graphopt.errors import PassError
from graphopt.ir.call_by_call import differences_of_calls
from graphopt.ir.numeric import differences, random_inputs
from graphopt.ir.program import Program
from graphopt.operators.fp8 import MATMUL
from graphopt.passes.insert_quantize import InsertQuantize
from graphopt.pipeline.bisect import bisect
from graphopt.pipeline.pass_base import Changes, Numerics, Pass
from graphopt.pipeline.pipeline import Pipeline, Verify
from tests.support.fp8 import DYNAMIC, joint_program, tagged
from tests.support.graphs import program_of

aten = torch.ops.aten
WIDTH, LAYERS = 32, 3
Break = Callable[[Program, fx.Node], object]


class Attention(nn.Module):
    """With weights of size one its scores are about 32 apart: the smallest error may move all of a row elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return x + nn.functional.layer_norm((scores / WIDTH**0.5).softmax(-1) @ self.value(x), (WIDTH,))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@cache
def deep() -> Program:
    return tagged(joint_program(Deep(), {"x": torch.randn(WIDTH, WIDTH)}))


def half_scale(program: Program, product: fx.Node) -> None:
    """Codes that stand for half of what they were made of."""
    half = program.insert_before(product, aten.mul.Tensor, product.args[1], 0.5)
    product.update_arg(1, half)


def scale_of_another(program: Program, product: fx.Node) -> None:
    """The scale of the other operand in the place of its own."""
    product.update_arg(1, product.args[4])


def transposed(program: Program, product: fx.Node) -> None:
    """The second operand the wrong way round: it is square, so that shapes fit."""
    product.update_arg(3, program.insert_before(product, aten.t.default, product.args[3]))


def dropped(program: Program, product: fx.Node) -> None:
    """Zeros in the place of the product."""
    _keep_rows(program, product, torch.zeros(WIDTH, 1))


def one_row_dropped(program: Program, product: fx.Node) -> None:
    """Zeros in the place of the last row."""
    _keep_rows(program, product, (torch.arange(WIDTH) < WIDTH - 1).float()[:, None])


def _keep_rows(program: Program, product: fx.Node, kept_T1: torch.Tensor) -> None:
    users = list(product.users)
    mask = program.insert_constant(product.next, kept_T1.bfloat16())
    masked = program.insert_before(mask.next, aten.mul.Tensor, product, mask)
    for user in users:
        user.replace_input_with(product, masked)


BREAKS: tuple[Break, ...] = (half_scale, scale_of_another, transposed, dropped, one_row_dropped)


@dataclass(frozen=True)
class BrokenInsertQuantize(Pass):
    """insert-quantize with a mistake in one product."""

    mistake: Break = half_scale
    position: int = 0

    name: ClassVar[str] = "broken-insert-quantize"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    tolerance: ClassVar[float | None] = InsertQuantize.tolerance

    def apply(self, program: Program) -> Changes:
        changes = InsertQuantize(recipe="tensorwise").apply(program)
        products = [node for node in program.ops() if node.target is MATMUL]
        self.mistake(program, products[self.position])
        program.refresh()
        return changes


# ---- what is no mistake ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_a_rounding_that_the_program_amplifies_is_no_mistake(recipe: str):
    item = InsertQuantize(recipe=recipe)
    after = Pipeline((item,)).run(deep(), verify=Verify.NUMERIC)
    inputs = random_inputs(deep())
    assert differences(deep(), after, inputs, tolerance=item.tolerance or 0.0), "outputs alone would be called wrong"
    assert bisect(deep(), Pipeline((item,))).broken is None


# ---- what is one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 4, -1], ids=["first", "inner", "last"])
@pytest.mark.parametrize("mistake", BREAKS, ids=lambda mistake: mistake.__name__)
def test_a_wrong_product_in_a_deep_model_is_found(mistake: Break, position: int):
    with pytest.raises(PassError, match="dB of signal over error"):
        Pipeline((BrokenInsertQuantize(mistake, position),)).run(deep(), verify=Verify.NUMERIC)


def test_bisect_names_the_value_behind_the_mistake():
    result = bisect(deep(), Pipeline((BrokenInsertQuantize(half_scale),)))
    (difference, *_) = result.differences
    assert result.broken is not None and difference.kind == "value"
    assert difference.decibels == pytest.approx(20 * math.log10(2), abs=0.5)
    assert "6." in str(difference) and difference.output in str(result)


def test_half_of_a_value_is_wrong_however_small_the_program_is():
    x = torch.randn(64)
    (difference,) = differences(program_of(torch.neg, x), program_of(lambda x: x * -0.5, x), [x], tolerance=0.5)
    assert difference.relative == 0.5 and difference.decibels == pytest.approx(20 * math.log10(2))


# ---- call by call ----------------------------------------------------------------------------------------------------


def test_only_the_call_that_differs_is_named():
    x = torch.randn(8)
    before = program_of(lambda x: x.neg().exp().sin(), x)
    after = before.copy()
    exp = next(node for node in after.ops() if node.target is aten.exp.default)
    exp.target = aten.exp2.default
    (difference,) = differences_of_calls(before, after, [x], tolerance=0.1)
    assert (difference.kind, difference.output) == ("value", exp.name)


def test_what_a_comparison_says_of_rounded_numbers_is_no_mistake():
    x = torch.tensor([1.0, 1.0 + 2**-12, 3.0])
    before = program_of(lambda x: ((x * 1).gt(1).float() + x).exp(), x)
    after = before.copy()
    (product,) = (node for node in after.ops() if node.target is aten.mul.Tensor)
    product.update_arg(0, after.insert_before(product, aten.floor.default, product.args[0]))
    assert differences(before, after, [x], tolerance=0.1)
    assert differences_of_calls(before, after, [x], tolerance=0.1) == ()


@dataclass(frozen=True)
class Turn(Pass):
    """Every call of ``turned`` becomes one of ``into``."""

    turned: torch._ops.OpOverload = aten.gt.Scalar
    into: torch._ops.OpOverload = aten.lt.Scalar

    name: ClassVar[str] = "turn"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def apply(self, program: Program) -> Changes:
        found = [node for node in program.ops() if node.target is self.turned]
        for node in found:
            node.target = self.into
        return Changes(len(found))


@dataclass(frozen=True)
class ExactTurn(Turn):
    """The same by a pass that only adds up in another order."""

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES


def masked(x):
    return (x * x.gt(0)).exp()


def chosen(x):
    return x.gather(1, x.argmax(1, keepdim=True)).exp()


@pytest.mark.parametrize(
    ("function", "item"),
    [
        (masked, Turn()),
        (masked, ExactTurn()),
        (chosen, Turn(aten.argmax.default, aten.argmin.default)),
        (chosen, ExactTurn(aten.argmax.default, aten.argmin.default)),
    ],
    ids=["mask", "mask-exact", "choice", "choice-exact"],
)
def test_a_turned_mask_and_a_turned_choice_are_wrong_and_named(function, item):
    before = program_of(function, torch.randn(64, 16))
    (turned,) = (node.name for node in before.ops() if node.target is item.turned)
    with pytest.raises(PassError, match=f"value {turned}: "):
        Pipeline((item,)).run(before, verify=Verify.NUMERIC)


def rounded_by(format: torch.dtype, function: Callable) -> tuple[Program, Program, torch.Tensor]:
    """A program of ``function``, the same with its input rounded to ``format`` and back, and numbers for both."""
    x = torch.randn(256, 16)
    before = program_of(lambda x: function(x), x)
    after = before.copy()
    first = next(iter(after.ops()))
    codes = after.insert_before(first, aten._to_copy.default, first.args[0], dtype=format)
    first.update_arg(0, after.insert_before(first, aten._to_copy.default, codes, dtype=torch.float32))
    return before, after, x


@pytest.mark.parametrize("function", [lambda x: x.gt(1).float().neg(), lambda x: x.argmax(1).neg().float().neg()])
def test_a_few_elements_that_jump_are_no_mistake(function):
    before, after, x = rounded_by(torch.bfloat16, function)
    x[0] = 1.0
    x[0, -1] = 1 + 2**-12
    assert differences(before, after, [x], tolerance=0.1)
    assert differences_of_calls(before, after, [x], tolerance=0.1) == ()


def test_an_imaginary_part_that_differs_is_a_difference():
    x = torch.complex(torch.randn(8), torch.randn(8))
    before = program_of(lambda x: (x * 1) + 0, x)
    after = program_of(lambda x: (x * 1).conj().resolve_conj() + 0, x)
    assert differences(before, after, [x], tolerance=0.1)


def test_a_call_with_several_results_may_have_the_name_of_one_with_one():
    x = torch.randn(8)
    before = program_of(lambda x: x.abs().exp(), x)
    after = program_of(lambda x: x.sort()[0].exp(), x)
    (call,) = (node for node in before.ops() if node.target is aten.abs.default)
    (sort,) = (node for node in after.ops() if node.target is aten.sort.default)
    call.name = sort.name
    assert differences_of_calls(before, after, [x], tolerance=0.1)
