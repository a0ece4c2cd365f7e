"""fold-quantize: pairs on one grid, copies that nobody reads, and the proof that codes are those that were there."""

from __future__ import annotations

import pytest
import torch

from graphopt.capture.trace import trace_function
from graphopt.ir.program import Stage
from graphopt.operators.fp8 import DEQUANTIZE, QUANTIZE, QUANTIZE_BOTH, QUANTIZE_TRANSPOSED
from graphopt.passes.fold_identities import FoldIdentities
from graphopt.passes.fold_quantize import FoldQuantize
from tests.support.graphs import run_pass, targets

GRIDS = ([0, 0], [1, 0], [0, 1], [1, 128], [128, 1], [128, 128])
FORMATS = ("e4m3", "e5m2")


def program_of(function, x):
    """At stage joint: before, gradients of what is merged would be added in another order."""
    return trace_function(function, x, stage=Stage.JOINT)


def wide_range(rows=130, columns=259, spread=10.0):
    """Rows of very different size, one of them zero, one that holds one number many times."""
    x = torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1) * spread)
    x[3] = 0
    x[5] = 225 / 448
    return x


def calls(program, target):
    return [node for node in program.ops() if node.target is target]


def again(grid, format="e4m3", power_of_two=True, dtype=torch.bfloat16, *, quantize_grid=None):
    """A function that quantizes, dequantizes and quantizes again; it returns what it got the second time, decoded."""

    def function(x):
        codes, scale = QUANTIZE(x, format, grid, power_of_two)
        wide = DEQUANTIZE(codes, scale, grid, dtype)
        once_more, new_scale = QUANTIZE(wide, format, quantize_grid or grid, power_of_two)
        return DEQUANTIZE(once_more, new_scale, quantize_grid or grid, torch.float32)

    return function


# ---- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_pair_on_one_grid_goes(grid):
    x = wide_range()
    after, record = run_pass(FoldQuantize(), program_of(again(grid), x), inputs=[x])
    assert len(calls(after, QUANTIZE)) == 1 and record.changes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_with_powers_of_two_every_number_is_the_same(format, dtype):
    for grid in GRIDS:
        x = wide_range()
        program = program_of(again(grid, format, True, dtype), x)
        after, _ = run_pass(FoldQuantize(), program, inputs=[x])
        assert torch.equal(program.run([x])[0], after.run([x])[0])


@pytest.mark.parametrize("format", FORMATS)
def test_without_them_the_codes_are_and_the_scale_is_the_one_they_were_made_with(format):
    for grid in GRIDS:
        x = wide_range()
        codes, scale = QUANTIZE(x, format, grid, False)
        second, second_scale = QUANTIZE(DEQUANTIZE(codes, scale, grid, torch.bfloat16), format, grid, False)
        assert torch.equal(codes.view(torch.uint8), second.view(torch.uint8))
        # bfloat16 rounds by at most 2**-9 of a number up to its next power of two, which is 2**-8 of the number.
        assert ((second_scale - scale) / scale).abs().max() <= 2.0**-8
        after, _ = run_pass(FoldQuantize(), program_of(again(grid, format, False), x), inputs=[x])
        assert torch.equal(after.run([x])[0], DEQUANTIZE(codes, scale, grid, torch.float32))


def test_several_readers_read_what_was_there():
    def function(x):
        codes, scale = QUANTIZE(x, "e4m3", [1, 0], True)
        wide = DEQUANTIZE(codes, scale, [1, 0], torch.float32)
        first, first_scale = QUANTIZE(wide, "e4m3", [1, 0], True)
        second, second_scale = QUANTIZE(wide.t(), "e4m3", [0, 1], True)
        return DEQUANTIZE(first, first_scale, [1, 0], torch.float32), second.float() * second_scale, wide + 1

    x = torch.randn(32, 48)
    after, record = run_pass(FoldQuantize(), program_of(function, x), inputs=[x])
    assert record.changes > 0 and len(calls(after, QUANTIZE)) == 2
    assert any("another order" in refusal.reason for refusal in record.refusals)


def test_codes_of_the_transpose_of_a_transpose_are_the_codes():
    def function(x):
        codes, scale = QUANTIZE(x, "e4m3", [1, 0], True)
        wide = DEQUANTIZE(codes, scale, [1, 0], torch.float32)
        turned, turned_scale = QUANTIZE_TRANSPOSED(wide.t(), "e4m3", [1, 0], True)
        return turned.float() * turned_scale

    x = torch.randn(32, 48)
    after, _ = run_pass(FoldQuantize(), program_of(function, x), inputs=[x])
    assert calls(after, QUANTIZE_TRANSPOSED) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grid": [1, 0], "quantize_grid": [0, 1]}, "on the grid [1, 0]"),
        ({"grid": [1, 0], "dtype": torch.float16}, "left the range"),
    ],
    ids=["grid", "float16"],
)
def test_another_grid_or_a_narrow_range_stays(options, reason):
    x = torch.randn(32, 48)
    _, record = run_pass(FoldQuantize(), program_of(again(**options), x), inputs=[x])
    assert record.changes == 0
    (refusal,) = record.refusals
    assert reason in refusal.reason


def test_another_format_stays():
    def function(x):
        codes, scale = QUANTIZE(x, "e4m3", [0, 0], True)
        other, other_scale = QUANTIZE(DEQUANTIZE(codes, scale, [0, 0], torch.float32), "e5m2", [0, 0], True)
        return other.float() * other_scale

    _, record = run_pass(FoldQuantize(), program_of(function, torch.randn(32, 48)))
    assert record.changes == 0 and "another format" in record.refusals[0].reason


def test_codes_that_are_returned_are_not_returned_twice():
    def function(x):
        codes, scale = QUANTIZE(x, "e4m3", [0, 0], True)
        second, second_scale = QUANTIZE(DEQUANTIZE(codes, scale, [0, 0], torch.float32), "e4m3", [0, 0], True)
        return codes, second, scale + second_scale

    _, record = run_pass(FoldQuantize(), program_of(function, torch.randn(32, 48)))
    assert record.changes == 0 and "output" in record.refusals[0].reason


# ---- copies that nobody reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 2])
def test_one_layout_of_two_is_made_where_only_one_is_read(position):
    def function(x):
        results = QUANTIZE_BOTH(x, "e4m3", [1, 0], [1, 0], True)
        return results[position].view(torch.uint8).sum() + results[position + 1].sum()

    x = torch.randn(32, 48)
    program = program_of(function, x)
    after, record = run_pass(FoldQuantize(), program, inputs=[x])
    assert record.changes == 1
    assert after.ops()[0].target is (QUANTIZE if position == 0 else QUANTIZE_TRANSPOSED)
    assert torch.equal(program.run([x])[0], after.run([x])[0])
    assert record.peak_bytes_before - record.peak_bytes_after >= 32 * 48


def test_both_layouts_stay_where_both_are_read():
    def function(x):
        codes, scale, codes_t, scale_t = QUANTIZE_BOTH(x, "e4m3", [1, 0], [1, 0], True)
        return codes.float() * scale, codes_t.float() * scale_t

    assert run_pass(FoldQuantize(), program_of(function, torch.randn(32, 48)))[1].changes == 0


def test_a_copy_that_nobody_reads_goes():
    def function(x):
        QUANTIZE(x, "e4m3", [1, 0], True)
        return x + 1

    after, record = run_pass(FoldQuantize(), program_of(function, torch.randn(32, 48)))
    assert record.changes == 1 and targets(after) == ["add"]


def test_a_transposition_of_a_transposition_of_codes_is_fold_identities_work():
    def function(x):
        codes, scale = QUANTIZE(x, "e4m3", [1, 0], True)
        return codes.t().t().float() * scale.t().t()

    after, _ = run_pass(FoldIdentities(), program_of(function, torch.randn(32, 48)))
    transpositions = calls(after, torch.ops.aten.t.default)
    assert {reader for node in transpositions for reader in node.users} <= set(transpositions)
