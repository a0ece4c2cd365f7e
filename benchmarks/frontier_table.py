"""The frontier's rows, and what they must show, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check, checks
from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.checks_table import checks_table
from benchmarks.frontier_rows import AT_PEAK, AT_SMALL_SHARE, SMALL_SHARE, SMALLEST, FrontierFigures
from benchmarks.peers import EAGER
from benchmarks.rows import Row

SUMMARY_EXPLANATION = """\
Peak against time: at exactly the peak of each peer, graphopt's step time over that peer's, both in the same rounds. The
smallest peak is what the smallest feasible budget gives. `none`: no plan that small was found. Every point:
`benchmarks/results/README.md`.\
"""
_SUMMARY_HEADINGS = (
    *("its peak", "its step, of eager's", "ours at its peak", f"ours at {SMALL_SHARE:g} of it"),
    *("our smallest peak", "step there, of eager's", "checks met"),
)

FrontierRows = Sequence[Row[FrontierFigures]]


def frontier_table(rows: FrontierRows, *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each point. ``of budget``: the whole step, what rests included. Peaks and times are also given over
    those of the peer that a point stands beside."""
    points = [row.figures for row in rows]
    peaks = {point.name: point.peak_bytes for point in points if not point.is_own}
    table = Table("contender", "beside", title=rows[0].subject.model, box=layout)
    for heading in (
        "budget",
        "peak",
        "of budget",
        "pred./meas.",
        "of its",
        "step",
        "of eager's",
        "of its",
        "first step",
    ):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for point in points:
        table.add_row(
            " ".join(filter(None, (point.name, point.backend, point.setting))),
            point.beside,
            bytes_cell(point.budget_bytes),
            bytes_cell(point.peak_bytes),
            "" if point.budget_ratio is None else f"{point.budget_ratio:.3f}",
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
    models = ((rows[0].subject.model, [row.figures for row in rows]) for rows in suites)
    return checks_table(((model, checks(model, points)) for model, points in models), layout=layout)


def summary_table(suites: Sequence[FrontierRows]) -> Table:
    """One line for each model and peer, and where graphopt stands at the peer's peak; of its backends the faster."""
    table = Table("model", "against")
    for heading in _SUMMARY_HEADINGS:
        table.add_column(heading, justify="right")
    for rows in suites:
        points, model = [row.figures for row in rows], rows[0].subject.model
        found = checks(model, points)
        for peer in (point for point in points if not point.is_own and point.name != EAGER):
            table.add_row(model, peer.name, *_summary_cells(peer, points, found))
    return table


def _summary_cells(peer: FrontierFigures, points: Sequence[FrontierFigures], found: Sequence[Check]) -> tuple[str, ...]:
    if peer.note:
        return (peer.note, *[""] * (len(_SUMMARY_HEADINGS) - 1))
    smallest = min((p for p in points if p.setting == SMALLEST and p.peak_bytes), key=_peak, default=None)
    own = [check for check in found if check.against == peer.name]
    return (
        bytes_cell(peer.peak_bytes),
        ratio_cell(peer.eager_ratio, 1.0),
        _fastest_cell(peer, points, AT_PEAK),
        _fastest_cell(peer, points, AT_SMALL_SHARE),
        "" if smallest is None else bytes_cell(smallest.peak_bytes),
        "" if smallest is None else ratio_cell(smallest.eager_ratio, 1.0),
        f"{sum(check.is_met for check in own)} of {len(own)}",
    )


def _fastest_cell(peer: FrontierFigures, points: Sequence[FrontierFigures], setting: str) -> str:
    """The time over the peer's of the fastest backend there, and which it is."""
    there = [(p.beside_ratio, p.backend) for p in points if p.setting == setting and p.beside == peer.name]
    timed = [(ratio, backend) for ratio, backend in there if ratio is not None]
    if not timed:
        return "none" if there else ""
    ratio, backend = min(timed)
    return f"{ratio:.2f} ({backend})"


def _peak(point: FrontierFigures) -> int:
    return point.peak_bytes or 0


def _prediction_cell(point: FrontierFigures) -> str:
    if point.predicted_peak_bytes is None or not point.peak_bytes:
        return ""
    return f"{point.predicted_peak_bytes / point.peak_bytes:.4f}"
