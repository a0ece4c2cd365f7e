"""Updates read a gradient as it was computed, where their operator widens it element by element anyway.

Before::

    mm: 'bf16[D,D]' = aten.mm.default(grad, x)
    gradient: 'f32[D,D]' = aten._to_copy.default(mm, dtype=torch.float32)
    new = graphopt.block_adam.default(weight, gradient, ...)

After::

    mm: 'bf16[D,D]' = aten.mm.default(grad, x)
    new = graphopt.block_adam.default(weight, mm, ...)

Saves ``4 * numel`` bytes while the update runs and a pass over both. Where gradients wait for each other (for the norm
of all), they wait in two bytes an element, not in four. Costs nothing. Numerics: exact, as every bfloat16 and float16
is a float32.

Refuses conversions that narrow, or that change the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.erase import erase_dead
from graphopt.ir.program import Program, Stage
from graphopt.ir.widening import is_widening
from graphopt.pipeline.pass_base import Changes, Pass, Refusal


@dataclass(frozen=True)
class SkipGradientCasts(Pass):
    """An update reads what its gradient is widened from."""

    name: ClassVar[str] = "skip-gradient-casts"
    stage: ClassVar[Stage] = Stage.STEP

    def apply(self, program: Program) -> Changes:
        count = 0
        refusals: list[Refusal] = []
        for node in program.ops():
            gradient = ops.widened_argument(node)
            if gradient is None or not ops.is_conversion(gradient):
                continue
            objection = _objection(program, gradient)
            if objection is None:
                node.replace_input_with(gradient, _source(gradient))
                erase_dead(program, (gradient,))
                count += 1
            else:
                refusals.append(Refusal.at(gradient, objection))
        return Changes(count, tuple(refusals))


def _source(conversion: fx.Node) -> fx.Node:
    source = conversion.args[0]
    assert isinstance(source, fx.Node), "a conversion has a tensor argument"
    return source


def _objection(program: Program, gradient: fx.Node) -> str | None:
    """Why the update must read ``gradient``, a conversion, or None."""
    before, after = program.spec(_source(gradient)), program.spec(gradient)
    if not is_widening(program, gradient):
        return f"it is narrowed from {before.dtype} to {after.dtype}"
    if after.dtype != torch.float32:
        return f"the update reads {torch.float32}, and this gradient is in {after.dtype}"
    if (before.stride, before.device) != (after.stride, after.device):
        return "the conversion changes how it lies in memory"
    return None
