"""A Report's memory as Markdown, in which nothing from the graph is read as markup."""

from __future__ import annotations

from graphopt.ir.units import format_bytes
from graphopt.report.code_span import code
from graphopt.report.data import Report
from graphopt.report.decisions import decision_markdown


def memory_markdown(report: Report) -> str:
    """``memory.md``: memory by class, the largest values alive at the peak with their source lines, the decisions."""
    peak = report.peak
    where = f" while {code(peak.op)} runs ({peak.segment})" if peak is not None else ""
    lines = [
        "# Memory at the peak",
        "",
        f"{format_bytes(report.predicted_peak_bytes)} above {format_bytes(report.resident_bytes)} resident{where}.",
        "",
        "| class | size | bytes |",
        "|---|---:|---:|",
        *(f"| {kind.label} | {format_bytes(nbytes)} | {nbytes} |" for kind, nbytes in report.memory.items()),
        f"| **total** | {format_bytes(report.memory.total)} | {report.memory.total} |",
        "",
        "## Largest values",
        "",
        "Parameters, state, buffers and the batch are not listed.",
        "",
        "| value | spec | class | size | from |",
        "|---|---|---|---:|---|",
    ]
    for value in report.largest:
        cells = (code(value.name), code(value.spec), value.memory_class, format_bytes(value.nbytes), code(value.origin))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *decision_markdown(report.decisions)]) + "\n"
