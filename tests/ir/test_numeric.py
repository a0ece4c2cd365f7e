"""Comparing two Programs by numbers: what uninitialised memory holds decides nothing."""

from __future__ import annotations

import pytest
import torch

from graphopt.ir.numeric import differences
from tests.support.graphs import program_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uninitialised_memory_is_alike_in_both_programs(dtype: torch.dtype):
    x = torch.randn(4)
    program = program_of(lambda x: x + torch.empty(4, dtype=dtype).to(torch.float32).mul(0), x)
    for left_over in (1, float("inf"), 0):  # what the next allocations of this size find
        kept = [torch.full((4,), float(left_over)) for _ in range(64)]
        del kept
        assert differences(program, program, [x], tolerance=0.0) == ()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filled", [torch.zeros, torch.ones], ids=["zeros", "ones"])
def test_memory_that_is_no_longer_filled_is_a_difference(filled, dtype: torch.dtype):
    if filled is torch.ones and dtype is torch.bool:
        pytest.skip("True is what fills memory of bool")
    x = torch.randn(4)
    before = program_of(lambda x: (filled(4, dtype=dtype), x + 1), x)
    after = program_of(lambda x: (torch.empty(4, dtype=dtype), x + 1), x)
    (difference,) = differences(before, after, [x], tolerance=0.1)
    assert difference.output == before.signature.outputs[0].name


@pytest.mark.parametrize("of", ["empty_like", "new_empty", "empty_strided", "empty_permuted"])
def test_every_operator_that_leaves_memory_uninitialised(of: str):
    makers = {
        "empty_like": torch.empty_like,
        "new_empty": lambda x: x.new_empty(4),
        "empty_strided": lambda x: torch.empty_strided((4,), (1,)),
        "empty_permuted": lambda x: torch.empty_permuted((4,), (0,)),
    }
    x = torch.randn(4)
    program = program_of(lambda x: x + makers[of](x), x)
    kept = [torch.full((4,), float(i)) for i in range(64)]
    del kept
    assert differences(program, program, [x], tolerance=0.0) == ()
