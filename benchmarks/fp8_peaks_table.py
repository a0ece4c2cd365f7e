"""The peaks of a training step in bf16 and in FP8, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.cells import bytes_cell, ratio_cell
from benchmarks.rows import Row


@dataclass(frozen=True)
class PeakFigures:
    """One precision at one number of tokens: its peak as measured, and as planned without what operators allocate
    inside themselves."""

    precision: str
    tokens: int
    measured_bytes: int
    planned_bytes: int


def peaks_table(rows: Sequence[Row[PeakFigures]]) -> Table:
    """One line for each row, beside bf16 at the same number of tokens."""
    table = Table("tokens", "precision")
    for heading in ("peak", "of bf16's", "without operators' own", "of bf16's"):
        table.add_column(heading, justify="right")
    base = {row.figures.tokens: row.figures for row in rows if row.figures.precision == "bf16"}
    for figures in (row.figures for row in rows):
        bf16 = base[figures.tokens]
        table.add_row(
            str(figures.tokens),
            figures.precision,
            bytes_cell(figures.measured_bytes),
            ratio_cell(figures.measured_bytes, bf16.measured_bytes),
            bytes_cell(figures.planned_bytes),
            ratio_cell(figures.planned_bytes, bf16.planned_bytes),
        )
    return table
