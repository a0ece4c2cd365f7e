"""Decisions to offload, made by hand, and steps that follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphopt.ir.decisions import Action, Decision, DecisionTable
from graphopt.ir.offloadable import OffloadFacts
from graphopt.ir.program import Program, Stage
from graphopt.passes.offload import Offload
from graphopt.pipeline.pass_base import Changes, Pass


def decide_offload(program: Program, *names: str) -> Program:
    """``program``, with the decision to offload the values called ``names``, or all that can leave."""
    facts = OffloadFacts(program)
    chosen = names or tuple(node.name for node in program.ops() if facts.objection(node) is None)
    rows = tuple(Decision(name, Action.OFFLOAD, 0, 0.0, "decided by a test") for name in chosen)
    program.decisions = DecisionTable("test", rows)
    return program


@dataclass(frozen=True)
class DecideOffload(Pass):
    """Decide to offload all that can leave; changes nothing itself."""

    name: ClassVar[str] = "decide-offload"
    stage: ClassVar[Stage] = Stage.STEP

    def apply(self, program: Program) -> Changes:
        decide_offload(program)
        return Changes(0)


def offload_all(prefetch: int = 2) -> list[Pass]:
    """Passes for ``graphopt.compile(passes=...)`` that offload all that can leave."""
    return [DecideOffload(), Offload(prefetch=prefetch)]
