"""The precision table as text and HTML: how many operators run in what and why, and the lines of ``explain``."""

from __future__ import annotations

from html import escape

from rich.table import Table

from graphopt.ir.precision_table import PrecisionRow, PrecisionTable

_MOST_LINES = 12


def precision_text(table: PrecisionTable) -> list[str | Table]:
    """The parts of the text report; empty where nothing was lowered."""
    if not table.rows:
        return []
    shown = Table("runs in", "why")
    shown.add_column("operators", justify="right")
    for dtype, reason, count in table.counts():
        shown.add_row(dtype, reason, str(count))
    return [f"precision of the forward part, computed in {table.compute}", shown]


def precision_html(table: PrecisionTable) -> str:
    """A table of every operator of the forward part; empty where nothing was lowered."""
    if not table.rows:
        return ""
    head = "".join(f"<th>{heading}</th>" for heading in ("operator", "value", "runs in", "why", "from"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_html_row, table.rows))}</tbody></table>"


def precision_lines(rows: tuple[PrecisionRow, ...]) -> list[str]:
    """What the operators in ``rows`` run in and why, for ``explain``."""
    lines = [f"  precision: {row}" for row in rows[:_MOST_LINES]]
    return lines if len(rows) <= _MOST_LINES else [*lines, f"  and {len(rows) - _MOST_LINES} more operators"]


def _html_row(row: PrecisionRow) -> str:
    cells = (row.operator, row.value, row.dtype, row.reason, str(row.origin))
    operator, value, dtype, reason, origin = map(escape, cells)
    return (
        f"<tr><td><code>{operator}</code></td><td><code>{value}</code></td><td>{dtype}</td><td>{reason}</td>"
        f"<td><code>{origin}</code></td></tr>"
    )
