"""What becomes of each value between its making and its use: one table that passes execute and people read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Action(StrEnum):
    """SAVE: stays in memory. RECOMPUTE: dropped after the forward part and computed again where the backward part needs
    it. OFFLOAD: leaves for host memory and comes back. RELEASE: a gradient that dies in its own update. KEEP: a
    gradient that waits for all others. RECAST: a copy in another dtype, made again where it is needed. QUANTIZE: kept
    for the backward part as FP8 codes.
    """

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    RELEASE = "release"
    KEEP = "keep"
    RECAST = "recast"
    QUANTIZE = "quantize"


@dataclass(frozen=True)
class Decision:
    """One value's fate. ``value``: its node's name; ``nbytes``: what its storage holds; ``seconds``: what the action
    costs by the cost model; ``copies``: how many times it is computed again; ``source``: where it comes from;
    ``again_at``: names of the backward calls from which on a copy of its own is read (none: one, or as phases say);
    ``kept_bytes``: what is held in its place, for the actions that keep something smaller.
    """

    value: str
    action: Action
    nbytes: int
    seconds: float
    reason: str
    source: str = ""
    copies: int = 0
    again_at: tuple[str, ...] = ()
    kept_bytes: int | None = None


@dataclass(frozen=True)
class DecisionTable:
    """The decisions of a program, in order of definition. ``policy``: what they were made by, as text; ``notes``: what
    a reader should know beyond the rows (the smallest feasible budget, how far the search went).

    ``phases``: names of the backward calls at which a phase begins; a value that is computed again more than once is
    so once in each phase that needs it. ``executed``: actions that the program has been rewritten for.
    ``budget_bytes``: what the whole step may take, resident bytes included, if a budget was given.
    """

    policy: str = "save everything"
    rows: tuple[Decision, ...] = ()
    phases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    executed: tuple[Action, ...] = ()
    budget_bytes: int | None = None

    def of(self, value: str) -> Decision | None:
        """The decision about the value called ``value``, if there is one."""
        return next((row for row in self.rows if row.value == value), None)

    def with_action(self, *actions: Action) -> tuple[Decision, ...]:
        """The rows with one of ``actions``."""
        return tuple(row for row in self.rows if row.action in actions)

    def joined(self, *rows: Decision, notes: tuple[str, ...] = ()) -> DecisionTable:
        """This table with more rows; a row replaces an earlier one about the same value."""
        replaced = {row.value for row in rows}
        kept = tuple(row for row in self.rows if row.value not in replaced)
        return replace(self, rows=(*kept, *rows), notes=(*self.notes, *notes))
