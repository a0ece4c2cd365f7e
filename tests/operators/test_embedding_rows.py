"""graphopt::add_embedding_rows against the sum of two tables, at odd shapes; memory; what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from graphopt.execute.measure import measure_memory
from graphopt.ir.fake import FakeTensorMode
from graphopt.operators.embedding_rows import ADD_EMBEDDING_ROWS, ADD_EMBEDDING_ROWS_IN_PLACE

aten = torch.ops.aten


def two_tables(gradient, rows, ids, padding):
    table = aten.embedding_dense_backward.default(rows, ids, gradient.shape[0], padding, False)
    return gradient + table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_rows", "shape", "features"), [(1, (1,), 1), (7, (123,), 3), (50, (3, 41), 33)])
@pytest.mark.parametrize("padding", [-1, 0])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_equals_the_sum_of_two_tables(dtype, num_rows, shape, features, padding, ids_dtype):
    gradient = torch.randn(num_rows, features, dtype=dtype)
    rows, ids = torch.randn(*shape, features, dtype=dtype), torch.randint(0, num_rows, shape, dtype=ids_dtype)
    expected = two_tables(gradient, rows, ids, padding)

    assert torch.equal(ADD_EMBEDDING_ROWS(gradient, rows, ids, padding), expected)
    assert ADD_EMBEDDING_ROWS_IN_PLACE(gradient, rows, ids, padding) is gradient
    assert torch.equal(gradient, expected)


def test_rows_of_one_token_are_summed_before_they_are_added():
    gradient = torch.tensor([[1.0]])
    rows = torch.full((4, 1), 2.0**-25)  # each alone is lost beside 1, together they are its next number
    assert ADD_EMBEDDING_ROWS(gradient, rows, torch.zeros(4, dtype=torch.int64), -1).item() == 1 + 2.0**-23


def test_rows_in_lower_precision_are_summed_in_that_of_the_gradient():
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)  # 257 has no bfloat16
    assert ADD_EMBEDDING_ROWS(torch.zeros(1, 1), rows, torch.zeros(2, dtype=torch.int64), -1).item() == 257


def test_rows_of_the_padding_are_left_out_even_if_not_finite():
    rows = torch.tensor([[float("nan")], [2.0]])
    added = ADD_EMBEDDING_ROWS(torch.zeros(3, 1), rows, torch.tensor([2, 0]), 2)
    assert added.flatten().tolist() == [2.0, 0.0, 0.0]


def test_other_layouts_are_kept():
    gradient = torch.randn(5, 20).t()
    rows = torch.randn(5, 8).t()
    ids = torch.randint(0, 20, (16,))[::2]
    added = ADD_EMBEDDING_ROWS(gradient, rows, ids, -1)
    assert torch.equal(added, two_tables(gradient, rows.contiguous(), ids, -1))
    assert added.stride() == gradient.stride()


def test_no_ids_change_nothing():
    gradient = torch.randn(4, 2)
    empty = torch.empty(0, dtype=torch.int64)
    assert torch.equal(ADD_EMBEDDING_ROWS(gradient, torch.empty(0, 2), empty, -1), gradient)


def test_in_place_holds_the_rows_once_more_and_nothing_of_the_table():
    gradient, rows = torch.zeros(10_000, 16), torch.randn(32, 16)
    ids = torch.randint(0, 10_000, (32,))
    peak = measure_memory(lambda: ADD_EMBEDDING_ROWS_IN_PLACE(gradient, rows, ids, -1)).peak_bytes
    assert peak < 3 * rows.nbytes < gradient.nbytes / 100


def test_memory_does_not_depend_on_the_ids():
    gradient, rows = torch.zeros(1000, 16), torch.randn(32, 16)
    peaks = {
        measure_memory(lambda ids=ids: ADD_EMBEDDING_ROWS_IN_PLACE(gradient, rows, ids, -1)).peak_bytes
        for ids in (torch.zeros(32, dtype=torch.int64), torch.arange(32))
    }
    assert len(peaks) == 1


def test_fake_values_have_the_layout_of_real_ones():
    with FakeTensorMode():
        gradient = torch.empty(5, 20).t()
        arguments = (gradient, torch.empty(8, 5), torch.empty(8, dtype=torch.int64), -1)
        assert ADD_EMBEDDING_ROWS(*arguments).stride() == (1, 20)
        assert ADD_EMBEDDING_ROWS_IN_PLACE(*arguments) is gradient
