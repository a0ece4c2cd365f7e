"""The optimizer state of each parameter, as text, HTML and for ``explain``: summed by format, then row by row."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.table import Table

from graphopt.capture.accumulation import WINDOW
from graphopt.execute.state_rows import NO_STATE, StateRow
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind
from graphopt.ir.units import format_bytes
from graphopt.kernels import cpu_path

_NUM_ROWS_AS_TEXT = 24
_HEADINGS = ("optimizer state of", "spec", "kept as", "size", "why")


def state_totals(rows: Sequence[StateRow]) -> list[str]:
    """One line for each format: how many parameters, and bytes."""
    formats = dict.fromkeys(row.format for row in rows if row.format != NO_STATE)
    lines = []
    for name in formats:
        inside = [row for row in rows if row.format == name]
        lines.append(f"state {name}: {len(inside)} parameters, {format_bytes(sum(row.nbytes for row in inside))}")
    return lines


def state_text(rows: Sequence[StateRow]) -> list[str | Table]:
    """The parts of the text report: the first rows in the model's order; empty without rows."""
    if not rows:
        return []
    table = Table(*_HEADINGS[:3])
    table.add_column(_HEADINGS[3], justify="right")
    table.add_column(_HEADINGS[4])
    for row in rows[:_NUM_ROWS_AS_TEXT]:
        table.add_row(row.parameter, row.spec, row.format, format_bytes(row.nbytes), row.reason)
    more = len(rows) - _NUM_ROWS_AS_TEXT
    hidden = [f"and {more} more: report.state, report.to_html(path)"] if more > 0 else []
    return [*state_totals(rows), table, *hidden]


def state_html(rows: Sequence[StateRow]) -> str:
    """A list of totals and a table of every row; empty without rows."""
    if not rows:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in state_totals(rows))
    head = "".join(f'<th class="{"number" if h == "size" else ""}">{h}</th>' for h in _HEADINGS)
    body = "".join(_html_row(row) for row in rows)
    return f"<ul>{items}</ul><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def state_lines(rows: Sequence[StateRow], parameter: str) -> list[str]:
    """How the state of ``parameter`` is kept, for ``explain``; empty for other names."""
    return [
        f"  optimizer state: {row.format}, {format_bytes(row.nbytes)}: {row.reason}"
        for row in rows
        if row.parameter == parameter
    ]


def bytes_beside(program: Program, rows: Sequence[StateRow]) -> int:
    """Bytes of state that rest in memory while ``program`` runs, though it reads none of them: an accumulation window
    is filled beside the state that its update will use.
    """
    names = [entry.name for _, entry in program.signature.inputs_of(InputKind.STATE)]
    read = {name.partition(".")[2] for name in names if not name.startswith(f"{WINDOW}.")}
    return sum(row.nbytes for row in rows if row.parameter not in read and not row.is_paged)


def state_notes(rows: Sequence[StateRow]) -> tuple[str, ...]:
    """Which form of the block kernels a CPU runs; nothing where none is used."""
    if not any(row.by_blocks and row.device == "cpu" for row in rows):
        return ()
    return (f"8-bit updates on the CPU: {cpu_path()}",)


def _html_row(row: StateRow) -> str:
    name, spec, kept, why = map(escape, (row.parameter, row.spec, row.format, row.reason))
    return (
        f'<tr class="state" data-bytes="{row.nbytes}"><td class="name"><code>{name}</code></td>'
        f'<td class="spec"><code>{spec}</code></td><td>{kept}</td>'
        f'<td class="number">{format_bytes(row.nbytes)}</td><td>{why}</td></tr>'
    )
