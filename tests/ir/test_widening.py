"""What a value is widened from."""

from __future__ import annotations

import pytest
import torch

import graphopt
from graphopt.ir.widening import before_widening

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64, "i32": torch.int32}
DTYPES["e4m3"] = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("bf16", "f32"), "bf16"),
        (("f16", "f32", "f64"), "f16"),
        (("f32", "bf16"), "bf16"),
        (("bf16", "f16"), "f16"),
        (("i32", "f64"), "f64"),
        (("f32", "bf16", "f32"), "bf16"),
        (("e4m3", "f32", "f64"), "f32"),
        (("f32", "e4m3"), "e4m3"),
    ],
)
def test_what_rounds_or_counts_is_no_widening(path, expected):
    start, *others = (DTYPES[name] for name in path)

    def convert(x):
        for dtype in others:
            x = x.to(dtype)
        return x

    program = graphopt.capture(convert, torch.ones(3, dtype=start))
    (value,) = program.output_values()
    assert program.spec(before_widening(program, value)).dtype is DTYPES[expected]
