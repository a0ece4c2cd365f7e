"""Decide what is saved, computed again or offloaded between forward and backward, and write it into the table.

Before: ``program.decisions`` has no rows about values of the forward part. After: one row for each value that the
backward part needs; the text is the same, ``recompute`` and ``offload`` act.

Saves nothing itself. Costs compile time: a policy one simulation of the step, a budget some hundred. A budget that no
plan meets is a BudgetError naming the smallest one that some plan does. Refuses a program that has been rewritten for
its decisions: what is computed again there is not known as such any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from graphopt.checkpoint import Policy
from graphopt.ir.liveness import Workspace, no_workspace
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal
from graphopt.planner.decide import MemoryRequest, decide


@dataclass(frozen=True)
class DecideMemory(Pass):
    """Fill the decision table by a policy or for a budget of the whole step, ``reserved_bytes`` beside it included."""

    policy: Policy | None = None
    budget: int | str | Fraction | None = None
    reserved_bytes: int = 0
    margin_bytes: int = 0

    name: ClassVar[str] = "decide-memory"
    stage: ClassVar[Stage] = Stage.STEP
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def apply(self, program: Program) -> Changes:
        return self._decided(program, no_workspace)

    def prepared(self, workspace: Workspace) -> Pass:
        """This pass with the workspace of the pipeline that runs it."""
        return _DecideMemoryWith(self.policy, self.budget, self.reserved_bytes, self.margin_bytes, workspace)

    def _decided(self, program: Program, workspace: Workspace) -> Changes:
        request = MemoryRequest(self.policy, self.budget, self.reserved_bytes, self.margin_bytes)
        if request.is_idle:
            return Changes(0)
        if program.decisions.executed:
            done = ", ".join(program.decisions.executed)
            return Changes(0, (Refusal("", f"decisions about this program were carried out ({done}); decide before"),))
        program.decisions = decide(program, request, workspace)
        return Changes(0)


@dataclass(frozen=True)
class _DecideMemoryWith(DecideMemory):
    """The pass that knows what operators allocate inside themselves."""

    workspace: Workspace = no_workspace

    def apply(self, program: Program) -> Changes:
        return self._decided(program, self.workspace)
