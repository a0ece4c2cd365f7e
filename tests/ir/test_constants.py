"""What constants may be evaluated, and that evaluation is exact, bounded and frees what it no longer needs."""

from __future__ import annotations

import pytest
import torch

from graphopt.ir import constants
from graphopt.ir.constants import ConstantValues, NotConstant
from graphopt.ir.program import Program
from tests.support.graphs import program_of


def last_op(program: Program) -> torch.fx.Node:
    """The call that makes the first output."""
    return program.output_values()[0]


def test_evaluates_what_factories_and_numbers_make():
    program = program_of(lambda x: torch.arange(6).reshape(2, 3).cumsum(1) * 2, torch.zeros(1))
    value = ConstantValues(program).value(last_op(program))
    assert torch.equal(value, torch.arange(6).reshape(2, 3).cumsum(1) * 2)


def test_evaluates_stored_constants():
    table = torch.tensor([3.0, 4.0])
    program = program_of(lambda x: table.flip(0) + 1, torch.zeros(1))
    assert torch.equal(ConstantValues(program).value(last_op(program)), torch.tensor([5.0, 4.0]))


def test_reason_names_the_first_input():
    program = program_of(lambda x, y: (torch.arange(3) + y) * x, torch.zeros(3), torch.zeros(3))
    assert ConstantValues(program).why_not(last_op(program)) == "depends on input 1"


def test_factory_needs_only_the_shape_of_its_input():
    program = program_of(lambda x: torch.ones_like(x) + 1, torch.zeros(2, 3))
    assert torch.equal(ConstantValues(program).value(last_op(program)), torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.rand(3) + 1, "is random"),
        (lambda x: torch.empty(3) + 1, "uninitialised memory"),
    ],
)
def test_never_evaluates_random_or_uninitialised_memory(function, reason):
    program = program_of(function, torch.zeros(1))
    value = ConstantValues(program).value(last_op(program))
    assert isinstance(value, NotConstant) and reason in value.reason


def test_refuses_more_bytes_than_allowed():
    program = program_of(lambda x: torch.arange(1024) + 1, torch.zeros(1))
    assert isinstance(ConstantValues(program, max_bytes=8 * 1024).value(last_op(program)), NotConstant)
    assert isinstance(ConstantValues(program, max_bytes=16 * 1024).value(last_op(program)), torch.Tensor)


def test_frees_intermediates():
    def chain(x):
        value = torch.arange(1024)
        for _ in range(50):
            value = value + 1
        return value

    program = program_of(chain, torch.zeros(1))
    value = ConstantValues(program, max_bytes=2 * 8 * 1024).value(last_op(program))
    assert torch.equal(value, torch.arange(1024) + 50)


def test_refuses_more_ops_than_allowed():
    program = program_of(lambda x: torch.arange(4) + 1 + 2 + 3, torch.zeros(1))
    value = ConstantValues(program, max_ops=3).value(last_op(program))
    assert isinstance(value, NotConstant) and "4 operators" in value.reason


def test_evaluates_each_value_once():
    program = program_of(lambda x: torch.arange(4) + 1, torch.zeros(1))
    known = ConstantValues(program)
    assert known.value(last_op(program)) is known.value(last_op(program))


def test_a_long_chain_needs_no_recursion():
    def chain(x):
        value = torch.arange(2)
        for _ in range(3000):
            value = value + 1
        return value

    program = program_of(chain, torch.zeros(1))
    assert torch.equal(ConstantValues(program).value(last_op(program)), torch.arange(2) + 3000)


def causal_mask(x):
    position = torch.arange(7)[torch.arange(3)[:, None] * 0 + torch.arange(7)]
    return (position[:, None, None, :] <= position[:, None, :, None]) & torch.ones((), dtype=torch.bool)


def test_blocks_cover_the_whole_value_exactly_once(monkeypatch):
    monkeypatch.setattr(constants, "BLOCK_ELEMENTS", 14)
    program = program_of(causal_mask, torch.zeros(1))
    seen = torch.full((3, 1, 7, 7), -1)
    for block in ConstantValues(program).blocks(last_op(program)):
        batch, head, row, _ = block.start
        target = seen[batch, head, row : row + block.values.shape[2]]
        assert bool((target == -1).all())
        target.copy_(block.values[0, 0])
    assert torch.equal(seen, causal_mask(None).long())


def test_blocks_visit_a_repeated_batch_once():
    program = program_of(lambda x: torch.ones(4, 4).tril().bool().expand(8, 2, 4, 4), torch.zeros(1))
    blocks = list(ConstantValues(program).blocks(last_op(program)))
    assert [block.values.shape for block in blocks] == [(1, 1, 4, 4)]


def test_blocks_need_less_memory_than_the_value():
    program = program_of(lambda x: torch.arange(512)[:, None] >= torch.arange(512)[None, :], torch.zeros(1))
    known = ConstantValues(program, max_bytes=64 * 1024)
    assert isinstance(known.value(last_op(program)), NotConstant)
    assert all(isinstance(block.values, torch.Tensor) for block in known.blocks(last_op(program)))


def test_blocks_refuse_what_depends_on_an_input():
    program = program_of(lambda x: torch.ones(4, 4).tril() * x, torch.zeros(1))
    assert ConstantValues(program).blocks(last_op(program)) == NotConstant("depends on input 0")
