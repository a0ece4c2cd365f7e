"""Whether a budget holds for a program as it is, before anything is given up for it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program
from graphopt.ir.reuse import planned_reuse
from graphopt.ir.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class Room:
    """A budget of the whole step (None: there is none); ``reserved_bytes`` and ``margin_bytes`` of it are not free."""

    budget: int | str | Fraction | None
    reserved_bytes: int = 0
    margin_bytes: int = 0

    def objection(self, program: Program) -> str | None:
        """Why nothing need be done for the budget, or None.

        Without a budget less is always better; a Fraction is asked for where less is wanted than the step would take.
        What operators allocate inside themselves is not counted.
        """
        if self.budget is None or isinstance(self.budget, Fraction):
            return None
        budget = parse_bytes(self.budget, name="memory")
        plan = plan_memory(program, storages=planned_reuse(program).storages)
        needed = plan.peak_bytes + plan.resident_bytes + self.reserved_bytes + self.margin_bytes
        return f"the budget of {format_bytes(budget)} holds without it" if needed <= budget else None
