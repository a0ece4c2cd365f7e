"""Pointwise operators write into an operand that dies with them; parameters and state are updated where they lie.

Before::

    mul = aten.mul.Tensor(p_weight, decay)          # p_weight is not read again, its update is written into it
    gelu_backward = aten.gelu_backward.default(grad, x)   # grad dies here

After::

    mul_ = aten.mul_.Tensor(p_weight, decay)
    gelu_backward = aten.gelu_backward.grad_input(grad, x, grad_input=grad)

An operator with several results that are new values of its arguments (an update by blocks) writes all of them, if it
may write all of them: ``graphopt.block_adam`` becomes ``graphopt.block_adam_``.

Saves the bytes of the result (``numel * itemsize``) while the operator runs, and the page faults of fresh memory.
Costs nothing: the same kernel computes the same bits into other memory. Refuses where the operand is read again, is
returned, belongs to the caller (unless this is its own update), is a constant, has a conjugate or negative view, does
not fill its storage, or overlaps another operand without being the same view. Runs last: the program is not functional
any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphopt.ir.in_place import in_place_call
from graphopt.ir.program import Program, Stage
from graphopt.ir.reuse import DyingOperands
from graphopt.ir.storage import storage_map
from graphopt.ir.write_results import write_results
from graphopt.pipeline.pass_base import Changes, Numerics, Pass


@dataclass(frozen=True)
class ReuseLastUse(Pass):
    """Let pointwise operators write into operands that die with them."""

    name: ClassVar[str] = "reuse-last-use"
    stage: ClassVar[Stage] = Stage.ANY
    numerics: ClassVar[Numerics] = Numerics.EXACT
    in_place: ClassVar[bool] = True

    def apply(self, program: Program) -> Changes:
        storages = storage_map(program)
        facts = DyingOperands(program, storages)
        count = 0
        for node in program.ops():
            if write_results(program, facts, node):
                count += 1
                continue
            operand = next(facts.reusable(node), None)
            if operand is None:
                continue
            twin = in_place_call(program, node, operand)
            if twin is None:
                continue
            facts.joined(node, twin, operand)
            program.take_over(node, twin)
            count += 1
        if count:
            program.refresh()
        return Changes(count)
