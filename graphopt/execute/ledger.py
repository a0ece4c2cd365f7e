"""What became of each update: counters, the loss scale, schedules and ``last_update`` follow it, at once or late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphopt.execute.interrupts import held_interrupts
from graphopt.execute.schedules import Schedules
from graphopt.execute.train_state import TrainState
from graphopt.execute.update_info import UpdateInfo, update_info
from graphopt.execute.verdict import Evidence, Verdict


@dataclass(frozen=True)
class UpdateFacts:
    """An update of the parameters ``names``: mean loss, micro-batches and weight (numbers, or tensors of one).

    ``weight``: that of a window; None for a step of one micro-batch, which has none.
    """

    names: tuple[str, ...]
    loss: Any
    micro_batches: int = 1
    weight: Any = None


@dataclass(frozen=True)
class _Pending:
    """An update that the program has decided on, and that nobody has asked about yet."""

    facts: UpdateFacts
    evidence: Evidence
    scale: torch.Tensor | None


class UpdateLedger:
    """Counts updates that were applied or skipped, in order."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.schedules = Schedules(state.facade)
        self._last: Any = None
        self._pending: _Pending | None = None

    @property
    def decides_late(self) -> bool:
        """Whether the compiled program decides whether an update is applied, and Python learns of it when it asks."""
        return self.state.decides_on_device

    @property
    def last(self) -> Any:
        """What ``step.last_update`` says; waits for an update on a device only where it is decided there."""
        self.settle()
        return self._last

    def written(self, facts: UpdateFacts) -> None:
        """The update is being written; part of the commit, so nothing of a user's is called here."""
        self.state.clear_window()
        self.state.advance(facts.names)
        if self.state.scaler is not None:
            self.state.scaler.note_applied()
        if self.state.fp8 is not None:
            self.state.fp8.note_applied()

    def applied(self, facts: UpdateFacts, verdict: Verdict, scale: float | None) -> None:
        """The update has been written; ``scale``: the loss scale it was computed with."""
        self.schedules.note_applied()
        if facts.weight is None and scale is None:
            self._last = update_info(facts.loss, verdict.norm)
            return
        weight = 1.0 if facts.weight is None else float(facts.weight)
        self._last = UpdateInfo(float(facts.loss), verdict.norm, facts.micro_batches, weight, loss_scale=scale)

    def skipped(self, facts: UpdateFacts, verdict: Verdict, scale: float | None) -> None:
        """Nothing has been written; an open window is dropped whole."""
        reason = verdict.skipped
        with held_interrupts():
            self.state.clear_window()
            self.state.skipped += 1
            if verdict.overflowed and self.state.scaler is not None and scale is not None:
                reason = f"{reason} (loss scale {scale:g})"
                self.state.scaler.note_overflow(scale)
            if verdict.fp8 is not None and self.state.fp8 is not None:
                self.state.fp8.note_skipped(verdict.fp8)
            self.schedules.note_skipped()
        loss = 0.0 if verdict.is_empty else float(facts.loss)
        self._last = UpdateInfo(loss, verdict.norm, facts.micro_batches, 0.0, skipped=reason, loss_scale=scale)

    def decided_later(self, facts: UpdateFacts, evidence: Evidence, scale: torch.Tensor | None) -> None:
        """The program has written the update or not; ``scale``: the loss scale it was computed with, if any."""
        self.state.clear_window()
        self._pending = _Pending(facts, evidence, scale)

    def hold_schedules(self) -> None:
        """Let schedules find out about an update that the program decided on before they move."""
        if self._pending is not None:
            self.schedules.hold_until_known(self.settle)

    def settle(self) -> None:
        """Find out about an update that the program decided on."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        verdict, scale = pending.evidence.verdict(), None if pending.scale is None else float(pending.scale)
        if verdict.skipped is not None:
            self.skipped(pending.facts, verdict, scale)
            return
        self.written(pending.facts)
        self.applied(pending.facts, verdict, scale)
