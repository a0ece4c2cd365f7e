"""Checks as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check
from benchmarks.cells import ratio_cell


def checks_table(found: Iterable[tuple[str, Iterable[Check]]], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each check of every subject."""
    table = Table("model", "against", "what, over its", box=layout)
    for heading in ("figure", "at most", "met"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for subject, checks in found:
        for check in checks:
            figure, bound = ratio_cell(check.figure, 1.0), f"{check.bound:.2f}"
            table.add_row(subject, check.against, check.what, figure, bound, _met(check), check.note)
    return table


def _met(check: Check) -> str:
    return "yes" if check.is_met else "no"
