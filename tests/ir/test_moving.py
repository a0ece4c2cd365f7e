"""Moving a computation up, and erasing one that nothing needs."""

from __future__ import annotations

import torch

from graphopt.ir.erase import erase_dead
from graphopt.ir.hoist import hoist
from graphopt.ir.verify import check_structure
from tests.support.graphs import program_of, targets


def test_moves_a_value_with_what_it_is_computed_from():
    program = program_of(lambda x, y: x.exp() * y.sin().cos(), torch.randn(4), torch.randn(4))
    exp, _, cos, _ = program.ops()

    assert hoist(program, cos, exp, max_bytes=16)

    check_structure(program)
    assert targets(program) == ["sin", "cos", "exp", "mul"]


def test_keeps_what_is_large_needs_the_anchor_or_draws():
    def function(x, y):
        first = x.exp()
        return first * y.sin(), first.cos(), torch.bernoulli(y.abs().clamp(max=1)).neg()

    program = program_of(function, torch.randn(4), torch.randn(4))
    before = targets(program)
    anchor = program.ops()[0]
    named = dict(zip(before, program.ops(), strict=True))

    assert not hoist(program, named["sin"], anchor, max_bytes=15)
    assert not hoist(program, named["cos"], anchor, max_bytes=16)
    assert not hoist(program, named["neg"], anchor, max_bytes=16)
    assert targets(program) == before


def test_a_value_that_lies_before_already_stays():
    program = program_of(lambda x: x.exp().sin(), torch.randn(4))
    exp, sin = program.ops()
    assert hoist(program, exp, sin, max_bytes=0) and targets(program) == ["exp", "sin"]


def test_erases_a_dead_call_with_what_only_it_used():
    program = program_of(lambda x: (x.exp(), x.exp().sin() + x.cos()), torch.randn(4))
    value, dead = program.output_values()
    program.set_outputs([value], program.signature.outputs[:1])

    erase_dead(program, [dead])

    check_structure(program)
    assert targets(program) == ["exp"]


def test_keeps_a_draw_and_what_is_used():
    program = program_of(lambda x: (x.sin(), torch.bernoulli(x).neg()), torch.rand(4))
    value, dead = program.output_values()
    program.set_outputs([value], program.signature.outputs[:1])

    erase_dead(program, [dead, value])

    assert targets(program) == ["sin", "bernoulli"]
