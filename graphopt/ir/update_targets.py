"""Which input each update of a program is written into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from graphopt.ir.program import Program
from graphopt.ir.spec import UPDATE_KINDS, Output, updated_input_kind


@dataclass(frozen=True)
class UpdateTarget:
    """The output at ``position`` returns ``value``, which is written into the input ``target``."""

    position: int
    output: Output
    value: Any
    target: fx.Node


def update_targets(program: Program) -> tuple[UpdateTarget, ...]:
    """The updates of ``program`` with what they are written into, in the order of its outputs."""
    placeholders = program.placeholders()
    found = []
    for position, (value, output) in enumerate(zip(program.output_values(), program.signature.outputs, strict=True)):
        if output.kind in UPDATE_KINDS:
            index = program.signature.input_index(output.name, updated_input_kind(output.kind))
            assert index is not None, f"no input to update for output {output.name!r}"
            found.append(UpdateTarget(position, output, value, placeholders[index]))
    return tuple(found)
