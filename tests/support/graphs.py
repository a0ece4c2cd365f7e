"""Small programs for tests, and the checks every pass must survive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.capture.trace import trace_function
from graphopt.ir.numeric import differences
from graphopt.ir.program import Program
from graphopt.ir.text import target_text
from graphopt.pipeline.pass_base import Pass, PassRecord
from graphopt.pipeline.pipeline import Pipeline, Verify


def program_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    """The forward Program of a tensor function; inputs and outputs are called "0", "1", ..."""
    return trace_function(function, *inputs)


def run_pass(item: Pass, program: Program, *, inputs: Sequence[Any] | None = None) -> tuple[Program, PassRecord]:
    """The program after ``item``, proved at every level on ``inputs``, and the record; also proves idempotence."""
    after = Pipeline((item,)).run(program, verify=Verify.NUMERIC, inputs=inputs)
    again = Pipeline((item,)).run(after, verify=Verify.NUMERIC, inputs=inputs)
    assert again.history[-1].changes == 0, f"{item.name} is not idempotent:\n{after}\nbecame\n{again}"
    return after, after.history[-1]


def targets(program: Program) -> list[str]:
    """The operators of a program in order, without namespace and overload: ``["mm", "add"]``."""
    return [target_text(node.target).removeprefix("aten.").split(".")[0] for node in program.ops()]


def assert_same_numbers(before: Program, after: Program, inputs: Sequence[Any]) -> None:
    """Bit-equal outputs, NaN equal to NaN."""
    assert differences(before, after, inputs, tolerance=0.0) == ()
