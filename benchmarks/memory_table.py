"""The memory suite's rows as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.peers import EAGER
from benchmarks.rows import MemoryFigures, Row

# "Predicted is measured": design/DESIGN.md, rule 7.
LARGEST_ESTIMATE_ERROR = 0.01
_HEADINGS = (
    *("ops", "changes", "estimated", "measured", "est./meas.", "of eager"),
    *("at rest", "saved", "step", "of eager's", "first step"),
)


def memory_table(rows: Sequence[Row[MemoryFigures]], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each row. ``!`` marks an estimate that is off by more than 1 %."""
    eager = next((row.figures for row in rows if row.figures.name == EAGER), None)
    subject = rows[0].subject
    title = f"{subject.model}: {subject.num_parameters / 1e6:.1f} M parameters, {subject.batch}"
    table = Table("after", "stage", title=title, box=layout)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row.figures, eager))
    return table


def _cells(figures: MemoryFigures, eager: MemoryFigures | None) -> tuple[str, ...]:
    position = "" if figures.position is None else f"{figures.position:02d} "
    return (
        f"{position}{figures.name}",
        figures.note or figures.stage or "",
        "" if figures.num_ops is None else str(figures.num_ops),
        "" if figures.changes is None or figures.kind != "pass" else str(figures.changes),
        bytes_cell(figures.estimated_peak_bytes),
        bytes_cell(figures.measured_peak_bytes),
        _estimate_cell(figures),
        ratio_cell(figures.measured_peak_bytes, eager.measured_peak_bytes if eager is not None else None),
        bytes_cell(figures.resting_bytes),
        bytes_cell(figures.saved_bytes),
        seconds_cell(figures.step_seconds),
        ratio_cell(figures.step_seconds, figures.eager_seconds),
        seconds_cell(figures.first_step_seconds),
    )


def _estimate_cell(figures: MemoryFigures) -> str:
    error = figures.estimate_error
    if error is None or figures.estimated_peak_bytes is None or not figures.measured_peak_bytes:
        return ""
    marker = " !" if error > LARGEST_ESTIMATE_ERROR else ""
    return f"{figures.estimated_peak_bytes / figures.measured_peak_bytes:.4f}{marker}"
