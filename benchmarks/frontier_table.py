"""The frontier's rows, and what they must show, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check, checks
from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.frontier_rows import FrontierFigures
from benchmarks.rows import Row

FrontierRows = Sequence[Row[FrontierFigures]]


def frontier_table(rows: FrontierRows, *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each point. Peaks and times are also given over those of the peer that a point stands beside."""
    points = [row.figures for row in rows]
    peaks = {point.name: point.peak_bytes for point in points if not point.is_own}
    table = Table("contender", "beside", title=rows[0].subject.model, box=layout)
    for heading in ("budget", "peak", "pred./meas.", "of its", "step", "of eager's", "of its", "first step"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for point in points:
        table.add_row(
            " ".join(filter(None, (point.name, point.backend, point.setting))),
            point.beside,
            bytes_cell(point.budget_bytes),
            bytes_cell(point.peak_bytes),
            _prediction_cell(point),
            ratio_cell(point.peak_bytes, peaks.get(point.beside)),
            seconds_cell(point.step_seconds),
            ratio_cell(point.eager_ratio, 1.0),
            ratio_cell(point.beside_ratio, 1.0),
            seconds_cell(point.first_step_seconds),
            point.note,
        )
    return table


def acceptance_table(suites: Sequence[FrontierRows], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each check of every model."""
    table = Table("model", "against", "what, over its", box=layout)
    for heading in ("figure", "at most", "met"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for rows in suites:
        model = rows[0].subject.model
        for check in checks(model, [row.figures for row in rows]):
            table.add_row(model, check.against, check.what, *_check_cells(check), check.note)
    return table


def _check_cells(check: Check) -> tuple[str, ...]:
    return (ratio_cell(check.figure, 1.0), f"{check.bound:.2f}", "yes" if check.is_met else "no")


def _prediction_cell(point: FrontierFigures) -> str:
    if point.predicted_peak_bytes is None or not point.peak_bytes:
        return ""
    return f"{point.predicted_peak_bytes / point.peak_bytes:.4f}"
