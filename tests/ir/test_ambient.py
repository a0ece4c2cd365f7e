"""What surrounds a call of graphopt changes nothing of a program that is there already."""

from __future__ import annotations

import pytest
import torch

from graphopt.ir.numeric import differences
from tests.support.graphs import program_of

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_values_are_inferred_and_run_without_the_users_autocast(dtype: torch.dtype):
    x = torch.randn(4, 4, dtype=dtype)
    program = program_of(lambda x: x @ x, x)
    (product,) = program.output_values()
    expected = program.run([x])[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = program.insert_before(program.output_node(), aten.mm.default, product, product)
        program.insert_before(program.output_node(), aten.stack.default, [product, again])
        assert program.spec(again).dtype is dtype
        assert torch.equal(program.run([x])[0], expected)
        assert differences(program, program, [x], tolerance=0.0) == ()
