"""Recipes of FP8: checked values, and their text."""

from __future__ import annotations

import pytest
import torch

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.fp8 import RECIPES, Blockwise, Delayed, Recipe, Rowwise, Tensorwise, recipe_of
from graphopt.precision import precision_of


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (Tensorwise(), "tensorwise"),
        (Tensorwise(gradients="e4m3", power_of_two=True), "tensorwise;gradients=e4m3;power_of_two=True"),
        (Rowwise(power_of_two=False, weight_gradient="bf16"), "rowwise;power_of_two=False;weight_gradient=bf16"),
        (Blockwise(exclude=("lm_head", "*.gate"), target="H100"), "blockwise;exclude=lm_head|*.gate;target=H100"),
        (Delayed(history=16, algo="most_recent", saved="none"), "delayed;saved=none;history=16;algo=most_recent"),
        (Rowwise(skip_first=1, include=("*.up",)), "rowwise;include=*.up;skip_first=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_recipe_prints_what_is_read_back(recipe, text):
    assert str(recipe) == text and recipe_of(text) == recipe


def test_every_recipe_is_found_by_its_name():
    assert {name: recipe_of(name) for name in RECIPES} == {name: kind() for name, kind in RECIPES.items()}


def test_a_predicate_prints_its_name_and_is_not_read_back():
    def large(facts):
        return facts.rows > 1024

    assert str(Tensorwise(choose=large)) == "tensorwise;choose=large"
    with pytest.raises(UnsupportedError, match="as text expects fields"):
        recipe_of("tensorwise;choose=large")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensorwise(gradients="e3m4"), "gradients expects one of 'e4m3', 'e5m2', came 'e3m4'"),
        (lambda: Tensorwise(power_of_two=1), "power_of_two expects one of True, False, came 1"),
        (lambda: Rowwise(weight_gradient="f16"), "weight_gradient expects one of 'fp8', 'bf16'"),
        (lambda: Rowwise(saved="some"), "saved expects one of"),
        (lambda: Rowwise(exclude="lm_head"), r"write exclude=\('lm_head',\)"),
        (lambda: Rowwise(exclude=None), r"exclude expects a tuple of module patterns, \(\) for none, came None"),
        (lambda: Rowwise(include=("a;b",)), "include expects module patterns"),
        (lambda: Rowwise(target=""), "target expects the name of a device"),
        (lambda: Rowwise(choose=3), "choose expects a function"),
        (lambda: Delayed(history=0), "history expects a whole number from 1 on"),
        (lambda: Delayed(margin=-1), "margin expects a whole number from 0 on"),
        (lambda: Delayed(margin=9), "margin expects at most 8, came 9: E4M3 holds"),
        (lambda: Delayed(algo="mean"), "algo expects one of 'max', 'most_recent'"),
        (lambda: Recipe(), "what all recipes share"),
        (lambda: recipe_of("colwise"), "one of tensorwise, rowwise, blockwise, delayed"),
        (lambda: recipe_of(8), "came 8"),
        (lambda: recipe_of("rowwise;power_of_two=2"), "power_of_two expects one of True, False"),
        (lambda: recipe_of("delayed;history=many"), "history expects a whole number"),
        (lambda: recipe_of("rowwise;history=16"), "as text expects fields"),
        (lambda: recipe_of("rowwise;exclude=a;exclude=b"), r"each field once, came exclude again; .* a\|b"),
        (lambda: precision_of("rowwise"), r"write graphopt.Precision\('fp8', fp8='rowwise'\) or graphopt.fp8.Rowwise"),
        (lambda: precision_of(Rowwise), r"write graphopt.fp8.Rowwise\(\), a value and not its class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_says_what_was_expected(make, message):
    with pytest.raises(UnsupportedError, match=message):
        make()


def test_precision_takes_a_recipe_its_name_or_its_text():
    assert precision_of("fp8").fp8 == Tensorwise()
    assert precision_of(Rowwise()) == graphopt.Precision("fp8", fp8="rowwise")
    assert graphopt.Precision("fp8", fp8="rowwise;gradients=e5m2").fp8 == Rowwise(gradients="e5m2")
    with pytest.raises(UnsupportedError, match="fp8='rowwise' needs compute='fp8'"):
        graphopt.Precision("bf16", fp8=Rowwise())


def test_an_unknown_target_is_an_error_before_any_batch():
    with pytest.raises(UnsupportedError, match=r"target expects one of A100, L4, .*, came 'V100'"):
        graphopt.compile(torch.nn.Linear(16, 16), ["loss"], precision=Rowwise(target="V100"))
