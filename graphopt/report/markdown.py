"""A Report's memory as Markdown, in which nothing from the graph is read as markup."""

from __future__ import annotations

import re

from graphopt.ir.units import format_bytes
from graphopt.report.data import Report


def memory_markdown(report: Report) -> str:
    """``memory.md``: memory by class and the largest values alive at the peak, with their source lines."""
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
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """``text`` as a code span in a table cell: its fence is longer than any run of backticks inside."""
    line = " ".join(text.split()).replace("|", r"\|")
    if not line:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    padding = " " if "`" in line else ""
    return f"{fence}{padding}{line}{padding}{fence}"
