"""fold-constants stores small values at the end of constant regions, and nothing else."""

from __future__ import annotations

import torch

from graphopt.ir.program import Program
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.fold_constants import FoldConstants
from tests.support.graphs import assert_same_numbers, program_of, run_pass, targets


def test_folds_a_region_to_one_constant():
    program = program_of(lambda x: x * ((torch.arange(4) + 1) * 2), torch.randn(4))
    after, record = run_pass(FoldConstants(), program)
    after, _ = run_pass(DropDead(), after)
    assert record.changes == 1
    assert targets(after) == ["mul"]
    assert after.constant(after.constants()[0]).tolist() == [2, 4, 6, 8]


def test_keeps_numbers_exact():
    program = program_of(lambda x: x * torch.arange(7, dtype=torch.float32).div(3).sin().exp(), torch.randn(7))
    after, _ = run_pass(FoldConstants(), program)
    assert_same_numbers(program, after, [torch.randn(7)])


def test_stores_no_intermediate_values():
    program = program_of(lambda x: x + torch.arange(4).add(1).mul(2).sub(3), torch.randn(4))
    after, _ = run_pass(FoldConstants(), program)
    assert len(after.constants()) == 1


def test_serves_several_users_with_one_constant():
    def function(x):
        table = torch.arange(4) + 1
        return x * table, x - table, x + table.unsqueeze(0)

    after, record = run_pass(FoldConstants(), program_of(function, torch.randn(4)))
    assert record.changes == 1
    assert len(after.constants()) == 1


def test_view_of_a_folded_value_shares_its_memory():
    program = program_of(lambda x: x * (torch.arange(4) + 1).unsqueeze(0), torch.randn(4))
    after, _ = run_pass(FoldConstants(), program)
    view = next(node for node in after.ops() if "unsqueeze" in str(node.target))
    constant = after.constants()[0]
    assert after.value(view).untyped_storage()._cdata == after.value(constant).untyped_storage()._cdata


def test_keeps_layout_of_what_it_folds():
    def function(x):
        return (x + torch.arange(6).reshape(2, 3).t().add(1)).flatten()

    program = program_of(function, torch.randn(3, 2))
    after, record = run_pass(FoldConstants(), program)
    assert record.changes == 1
    assert after.constant(after.constants()[0]).stride() == (1, 3)


def test_leaves_a_factory_alone():
    assert_unchanged(program_of(lambda x: x * torch.arange(4), torch.randn(4)))


def test_leaves_a_view_of_a_factory_alone():
    assert_unchanged(program_of(lambda x: x * torch.arange(4).unsqueeze(0), torch.randn(4)))


def test_leaves_what_depends_on_an_input():
    assert_unchanged(program_of(lambda x: x * (x.sum() + torch.arange(4)), torch.randn(4)))


def test_leaves_random_and_uninitialised_values():
    assert_unchanged(program_of(lambda x: x + torch.rand(4).mul(2) + torch.empty(4).mul(0), torch.randn(4)))


def test_leaves_dead_regions_alone():
    def function(x):
        torch.arange(4).add(1)
        return x * 2

    assert_unchanged(program_of(function, torch.randn(4)))


def test_a_returned_value_is_never_the_stored_constant():
    def function(x):
        table = torch.arange(4) + 1
        return table, (table * 2).unsqueeze(0), x * table

    after, _ = run_pass(FoldConstants(), program_of(function, torch.randn(4)))
    for output in after.run([torch.randn(4)])[:2]:
        output.fill_(-1)
    assert [value.tolist() for value in after.run([torch.randn(4)])[:2]] == [[1, 2, 3, 4], [[2, 4, 6, 8]]]


def test_folds_up_to_the_op_that_is_returned():
    program = program_of(lambda x: (torch.arange(4) + 1) * 2, torch.randn(4))
    after, _ = run_pass(FoldConstants(), program)
    after, _ = run_pass(DropDead(), after)
    assert targets(after) == ["mul"]
    assert after.constant(after.constants()[0]).tolist() == [1, 2, 3, 4]


def test_refuses_a_value_larger_than_allowed_and_folds_what_feeds_it():
    def function(x):
        position = torch.arange(8) + 1
        return x * (position[:, None] >= position[None, :])

    after, record = run_pass(FoldConstants(max_bytes=63), program_of(function, torch.randn(8, 8)))
    assert record.changes == 0
    assert "stay in memory for ever" in record.refusals[0].reason
    after, record = run_pass(FoldConstants(max_bytes=64), program_of(function, torch.randn(8, 8)))
    assert [after.spec(node).nbytes for node in after.constants()] == [64]


def test_refuses_once_for_a_region():
    def function(x):
        position = torch.arange(64) + 1
        return x * (position[:, None] >= position[None, :]).logical_not().logical_not()

    after, record = run_pass(FoldConstants(max_bytes=1024), program_of(function, torch.randn(64, 64)))
    assert len(record.refusals) == 1
    assert [after.spec(node).nbytes for node in after.constants()] == [512]


def test_folds_a_large_value_that_replaces_a_larger_constant():
    table = torch.randn(1000)
    program = program_of(lambda x: x * table.to(torch.bfloat16), torch.randn(1000))
    after, record = run_pass(FoldConstants(max_bytes=0), program)
    after, _ = run_pass(DropDead(), after)
    assert record.changes == 1
    assert [after.spec(node).nbytes for node in after.constants()] == [2000]


def test_keeps_a_large_value_whose_source_is_read_elsewhere():
    table = torch.randn(1000)
    program = program_of(lambda x: (x * table.to(torch.bfloat16), x + table), torch.randn(1000))
    _, record = run_pass(FoldConstants(max_bytes=0), program)
    assert record.changes == 0


def assert_unchanged(program: Program) -> None:
    """The pass changes nothing and declines nothing."""
    _, record = run_pass(FoldConstants(), program)
    assert (record.changes, record.refusals) == (0, ())
