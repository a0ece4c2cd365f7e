"""C14 (random or order-dependent nodes merged) and C15 (rewrites false for NaN, Inf, signed zero), end to end."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import graphopt


def compiled(function, *inputs):
    return graphopt.compile(function)(*inputs)["0"]


def test_two_dropouts_draw_twice():
    y = compiled(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), torch.ones(4000))
    assert set(y.tolist()) == {0.0, 2.0, 4.0}


def test_reads_on_both_sides_of_a_write_differ():
    def around_a_write(x):
        x = x.clone()
        a = x.sum()
        x.add_(1)
        return x.sum() - a

    assert compiled(around_a_write, torch.zeros(10)) == 10.0


def test_two_draws_differ():
    assert bool(compiled(lambda x: torch.rand(3) - torch.rand(3) + x, torch.zeros(3)).any())


def test_two_clones_stay_independent():
    out = graphopt.compile(lambda x: (x.clone(), x.clone()))(torch.ones(3))
    out["0"].add_(1)
    assert torch.equal(out["1"], torch.ones(3))


def test_clone_of_an_input_is_not_the_input():
    x = torch.ones(3)
    compiled(lambda x: x.clone(), x).add_(1)
    assert torch.equal(x, torch.ones(3))


def test_narrowing_cast_rounds():
    x = torch.tensor([1.0 + 2**-12])
    assert torch.equal(compiled(lambda x: x.to(torch.bfloat16).float(), x), torch.ones(1))


def test_true_duplicates_are_merged():
    def twice(x, w):
        return (x @ w) + (x @ w)

    x, w = torch.randn(3, 4), torch.randn(4, 5)
    module = graphopt.compile(twice)
    assert torch.equal(module(x, w)["0"], twice(x, w))


def test_non_finite_values_survive():
    x = torch.tensor([1.0, float("inf"), float("-inf"), float("nan")])
    for function in (lambda x: x * 0, lambda x: x - x, lambda x: x / x, lambda x: 0 * x + 1):
        expected, actual = function(x), compiled(function, x)
        assert torch.equal(expected.isnan(), actual.isnan()) and expected[0] == actual[0]


def test_integers_times_zero():
    assert torch.equal(compiled(lambda x: x * 0, torch.tensor([1, 2])), torch.tensor([0, 0]))


def test_sign_of_zero_survives_adding_zero():
    assert not compiled(lambda x: x + 0.0, torch.tensor([-0.0])).signbit()
    assert compiled(lambda x: x - 0.0, torch.tensor([-0.0])).signbit()


def test_dropout_equals_eager_with_one_seed():
    x = torch.randn(64, 32)
    for function in (
        lambda x: F.dropout(x, 0.1),
        lambda x: F.dropout(x.t(), 0.3),
        lambda x: F.dropout1d(x, 0.2),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1),
    ):
        torch.manual_seed(4)
        expected, state = function(x), torch.get_rng_state()
        torch.manual_seed(4)
        module = graphopt.compile(function)
        assert torch.equal(module(x)["0"], expected)
        assert torch.equal(torch.get_rng_state(), state)
