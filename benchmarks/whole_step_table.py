"""Rows of whole training steps, as a table, and what they must show, as checks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check
from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.eight_bit_peers import BITSANDBYTES, TORCHAO
from benchmarks.frontier_rows import median_ratio
from benchmarks.peers import EAGER, GRAPHOPT
from benchmarks.rows import Row

# The whole peak of graphopt over eager's, by the state of embeddings.
OF_EAGER = {"fp32": 0.42, "int8": 0.35}
# The whole peak of graphopt over that of a public recipe, and its time over theirs and over eager's.
OF_RECIPE = 0.75
_NO_MORE_TIME = 1.0


@dataclass(frozen=True)
class WholeStepFigures:
    """One contender. ``resting_bytes``: all that tensors hold between steps, of which ``state_bytes`` is optimizer
    state; ``peak_bytes`` come on top within a step. ``seconds`` are of rounds in which all took turns. ``note`` says
    why figures are missing. ``embeddings``: in what graphopt keeps the state of embedding tables."""

    name: str
    setting: str = ""
    embeddings: str = ""
    resting_bytes: int | None = None
    state_bytes: int | None = None
    peak_bytes: int | None = None
    first_step_seconds: float | None = None
    seconds: tuple[float, ...] = ()
    note: str = ""

    @property
    def label(self) -> str:
        """The contender and what sets it apart, as text."""
        embeddings = f"embeddings {self.embeddings}" if self.embeddings else ""
        return ", ".join(filter(None, (self.name, self.setting, embeddings)))

    @property
    def whole_bytes(self) -> int | None:
        """What rests and the peak above it."""
        if self.resting_bytes is None or self.peak_bytes is None:
            return None
        return self.resting_bytes + self.peak_bytes

    @property
    def step_seconds(self) -> float | None:
        """The median over the rounds."""
        return statistics.median(self.seconds) if self.seconds else None


Rows = Sequence[Row[WholeStepFigures]]
_SIZES = ("at rest", "of that state", "peak above", "whole", "of eager", "of torchao")
_TIMES = ("step", "of eager", "of torchao", "first step")


def whole_step_table(rows: Rows, *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each contender; ratios of time are medians of the ratios of the rounds."""
    table = Table("way", box=layout)
    for heading in (*_SIZES, *_TIMES):
        table.add_column(heading, justify="right")
    table.add_column("note")
    found = [row.figures for row in rows]
    bases = [_named(found, EAGER), _named(found, TORCHAO)]
    for figures in found:
        table.add_row(
            figures.label,
            bytes_cell(figures.resting_bytes),
            bytes_cell(figures.state_bytes),
            bytes_cell(figures.peak_bytes),
            bytes_cell(figures.whole_bytes),
            *(ratio_cell(figures.whole_bytes, base.whole_bytes) for base in bases),
            seconds_cell(figures.step_seconds),
            *(ratio_cell(median_ratio(figures.seconds, base.seconds), 1.0) for base in bases),
            seconds_cell(figures.first_step_seconds),
            figures.note,
        )
    return table


def whole_step_checks(found: Sequence[WholeStepFigures]) -> tuple[Check, ...]:
    """What each row of graphopt must show beside eager and the public recipes."""
    return tuple(check for figures in found if figures.name == GRAPHOPT for check in _checks_of(figures, found))


def _checks_of(own: WholeStepFigures, found: Sequence[WholeStepFigures]) -> Iterator[Check]:
    for name, bound in ((EAGER, OF_EAGER[own.embeddings]), (TORCHAO, OF_RECIPE), (BITSANDBYTES, OF_RECIPE)):
        base = _named(found, name)
        if base.whole_bytes is None:
            continue
        what = f"{own.setting}, embeddings {own.embeddings}"
        ratio = None if own.whole_bytes is None else own.whole_bytes / base.whole_bytes
        yield Check(name, f"{what}: whole peak", ratio, bound, own.note)
        if base.seconds:
            time = median_ratio(own.seconds, base.seconds)
            yield Check(name, f"{what}: step time", time, _NO_MORE_TIME, own.note)


def _named(found: Sequence[WholeStepFigures], name: str) -> WholeStepFigures:
    """The figures of a contender that is there once; empty ones if it is not."""
    return next((figures for figures in found if figures.name == name), WholeStepFigures(name))
