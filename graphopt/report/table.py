"""A Report as text, laid out by rich."""

from __future__ import annotations

from collections import Counter
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table

from graphopt.ir.units import format_bytes, format_seconds
from graphopt.pipeline.pass_base import PassRecord
from graphopt.report.data import Report
from graphopt.report.decisions import decision_text
from graphopt.report.fp8 import fp8_text
from graphopt.report.precision import precision_text
from graphopt.report.state import state_text

_WIDTH = 130
_NUM_LARGEST = 10


def report_text(report: Report, *, width: int = _WIDTH) -> str:
    """The report as plain text: the passes, memory by class, the largest values, refusals and notes."""
    return render(
        report.title,
        _headline(report),
        _pass_table(report.records),
        _memory_table(report),
        *state_text(report.state),
        _largest_table(report),
        *precision_text(report.precision),
        *fp8_text(report.fp8, report.fp8_products),
        *decision_text(report.decisions),
        *refusal_lines(report.records),
        *(f"note: {note}" for note in report.notes),
        width=width,
    )


def render(*parts: RenderableType, width: int = _WIDTH) -> str:
    """``parts`` as plain text; strings in them are never read as markup."""
    stream = StringIO()
    console = Console(
        file=stream, width=width, force_terminal=False, color_system=None, markup=False, emoji=False, highlight=False
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def refusal_lines(records: tuple[PassRecord, ...]) -> list[str]:
    """One line for each reason a pass gave for declining, with how often and the first node."""
    lines = []
    for record in records:
        counts = Counter(refusal.reason for refusal in record.refusals)
        for reason, count in counts.items():
            node = next(refusal.node for refusal in record.refusals if refusal.reason == reason)
            times = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"{record.name} declined at {node}{times}: {reason}")
    return lines


def _headline(report: Report) -> str:
    peak = report.peak
    where = f" while {peak.op} runs ({peak.segment})" if peak is not None else ""
    measured = ""
    if report.measured_peak_bytes is not None:
        measured = f", measured {format_bytes(report.measured_peak_bytes)}"
    reason = f" ({report.backend_reason})" if report.backend_reason else ""
    return (
        f"peak {format_bytes(report.predicted_peak_bytes)}{measured}, above {format_bytes(report.resident_bytes)} "
        f"resident{where}; backend {report.backend}{reason}"
    )


def _pass_table(records: tuple[PassRecord, ...]) -> Table:
    table = Table("pass", "stage", "numerics")
    for heading in ("changes", "ops", "peak", "saved for backward", "time", "refusals"):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            f"{record.position:02d} {record.name}",
            record.stage,
            record.numerics,
            str(record.changes),
            _change(str(record.ops_before), str(record.ops_after)),
            _change(format_bytes(record.peak_bytes_before), format_bytes(record.peak_bytes_after)),
            _change(format_bytes(record.saved_bytes_before), format_bytes(record.saved_bytes_after)),
            format_seconds(record.seconds),
            str(len(record.refusals) or ""),
        )
    return table


def _change(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"


def _memory_table(report: Report) -> Table:
    table = Table("memory at the peak")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    for kind, nbytes in report.memory.items():
        table.add_row(kind.label, format_bytes(nbytes), f"{nbytes:,}")
    table.add_section()
    table.add_row("total", format_bytes(report.memory.total), f"{report.memory.total:,}")
    return table


def _largest_table(report: Report) -> Table:
    table = Table("largest at the peak", "spec", "class")
    table.add_column("size", justify="right")
    table.add_column("from")
    for value in report.largest[:_NUM_LARGEST]:
        table.add_row(value.name, value.spec, value.memory_class, format_bytes(value.nbytes), value.origin)
    return table
