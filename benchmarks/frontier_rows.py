"""Rows of the frontier: peak against step time of every way to train one model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers import GRAPHOPT

KEEP = "keep everything"
SMALLEST = "smallest budget"
AT_PEAK = "at its peak"
# At the time of gradient checkpointing we are to need at most this much of its peak; so that is the budget to time.
SMALL_SHARE = 0.75
AT_SMALL_SHARE = f"at {SMALL_SHARE:g} of its peak"


@dataclass(frozen=True)
class PointKey:
    """Which row of a run: ``name`` the contender's; for graphopt also the backend, the setting, and the peer that it
    was run beside."""

    name: str
    backend: str = ""
    setting: str = ""
    beside: str = ""


@dataclass(frozen=True)
class FrontierFigures:
    """One point. ``peak_bytes``: above ``resting_bytes`` (parameters, buffers, optimizer state, batch) in a steady
    step by the allocator's events, and for graphopt ``constant_bytes`` more, which its graph holds beside them.

    ``predicted_peak_bytes`` is the plan's, counted alike. ``input_bytes``: what the plan takes as the caller's.
    ``own_seconds``, ``eager_seconds`` and ``beside_seconds`` are of the same rounds, in which all took turns;
    ``beside`` is a peer, at whose peak this one is compared. ``note`` says why figures are missing.
    """

    name: str
    backend: str = ""
    setting: str = ""
    beside: str = ""
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    resting_bytes: int | None = None
    constant_bytes: int | None = None
    input_bytes: int | None = None
    first_step_seconds: float | None = None
    own_seconds: tuple[float, ...] = ()
    eager_seconds: tuple[float, ...] = ()
    beside_seconds: tuple[float, ...] = ()
    note: str = ""

    @property
    def key(self) -> PointKey:
        """Which row this is."""
        return PointKey(self.name, self.backend, self.setting, self.beside)

    @property
    def is_own(self) -> bool:
        """Whether this is graphopt."""
        return self.name == GRAPHOPT

    @property
    def label(self) -> str:
        """The contender and what sets this point apart, as text."""
        setting = f"{self.setting} ({self.beside})" if self.setting in (AT_PEAK, AT_SMALL_SHARE) else self.setting
        return " ".join(filter(None, (self.name, self.backend, setting)))

    @property
    def step_seconds(self) -> float | None:
        """The median over the rounds."""
        return statistics.median(self.own_seconds) if self.own_seconds else None

    @property
    def eager_ratio(self) -> float | None:
        """The median over the rounds of the own time over eager's."""
        return median_ratio(self.own_seconds, self.eager_seconds)

    @property
    def beside_ratio(self) -> float | None:
        """The median over the rounds of the own time over that of the peer beside it."""
        return median_ratio(self.own_seconds, self.beside_seconds)

    @property
    def budget_ratio(self) -> float | None:
        """What the whole step took, inputs and all, over its budget; None without a budget."""
        if self.budget_bytes is None or self.peak_bytes is None or self.input_bytes is None:
            return None
        return (self.peak_bytes + self.input_bytes) / self.budget_bytes

    @property
    def estimate_error(self) -> float | None:
        """|predicted - measured| over measured."""
        if self.predicted_peak_bytes is None or not self.peak_bytes:
            return None
        return abs(self.predicted_peak_bytes - self.peak_bytes) / self.peak_bytes


def median_ratio(own: Sequence[float], base: Sequence[float]) -> float | None:
    """The median of the ratios round by round; None if either was not timed."""
    if not own or not base:
        return None
    return statistics.median(mine / other for mine, other in zip(own, base, strict=True))
