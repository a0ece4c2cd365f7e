"""Runs the kernels of a first scale in Triton's interpreter; a program, since Triton decides at import.

``python -m tests.support.interpreted_first_scale`` prints one JSON object: for each case whether the scale is that of
the operator on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import product

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from graphopt.kernels import fp8_first_scale_triton
from graphopt.operators import fp8_history

VALUES = (0.0, 1e-45, 1.0, 3e38, float("inf"), float("nan"))


def cases() -> Iterator[tuple[str, bool]]:
    for number, (value, known) in enumerate(product(VALUES, (0.0, 0.25))):
        x = torch.zeros(130, 7) if number % 2 else torch.zeros(7, 130).t()
        x[128, 3] = -value
        options = {"margin": number % 3, "power_of_two": number % 4 > 1}
        given, format = torch.full((1, 1), known), ("e4m3", "e5m2")[number % 2]
        found = fp8_first_scale_triton.first_scale(x, given, format, **options)
        expected = fp8_history.first_scale(x, given, format, *options.values())
        yield f"{value} known {known} {format} {options}", torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))


if __name__ == "__main__":
    json.dump(dict(cases()), sys.stdout)
