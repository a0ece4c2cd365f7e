"""Rows of updates alone, as a table, and what they must show, as checks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check
from benchmarks.cells import ratio_cell, seconds_cell
from benchmarks.frontier_rows import median_ratio
from benchmarks.rows import Row
from benchmarks.update_contenders import (
    BITSANDBYTES_8BIT,
    FUSED,
    OWN_COMPILED,
    OWN_LARGE_BLOCK,
    OWN_OPERATOR,
    TORCHAO_8BIT,
)

# Bytes of state for each parameter: two codes and two scales a block.
STATE_BYTES = {OWN_OPERATOR: 2.04, OWN_COMPILED: 2.04, OWN_LARGE_BLOCK: 2.01}
# The time of an update over that of public 8-bit ones, and over torch's fused one in 32 bits.
_OF_PUBLIC = 0.1
_OF_FUSED = 3.0
_STATE = "state"


@dataclass(frozen=True)
class UpdateFigures:
    """One way to update. ``state_bytes``: for each parameter, of the real tensors. ``seconds`` are of rounds in which
    all took turns. ``note`` says why figures are missing."""

    name: str
    state_bytes: float | None = None
    first_seconds: float | None = None
    seconds: tuple[float, ...] = ()
    note: str = ""


Rows = Sequence[Row[UpdateFigures]]
_RATIOS = ("of fused", "of torchao", "of bitsandbytes")
_HEADINGS = ("bytes a parameter", "update", "fastest", *_RATIOS, "first update")


def update_table(rows: Rows, *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each way; ratios are medians of the ratios of the rounds."""
    table = Table("way", box=layout)
    for heading in (
        "bytes a parameter",
        "update",
        "fastest",
        "of fused",
        "of torchao",
        "of bitsandbytes",
        "first update",
    ):
        table.add_column(heading, justify="right")
    table.add_column("note")
    found = [row.figures for row in rows]
    bases = [_named(found, name) for name in (FUSED, TORCHAO_8BIT, BITSANDBYTES_8BIT)]
    for figures in found:
        table.add_row(
            figures.name,
            "" if figures.state_bytes is None else f"{figures.state_bytes:.3f}",
            seconds_cell(statistics.median(figures.seconds) if figures.seconds else None),
            seconds_cell(min(figures.seconds, default=None)),
            *(ratio_cell(median_ratio(figures.seconds, base.seconds), 1.0) for base in bases),
            seconds_cell(figures.first_seconds),
            figures.note,
        )
    return table


def update_checks(found: Sequence[UpdateFigures]) -> Iterator[Check]:
    """What the rows of graphopt's 8-bit updates must show."""
    for name, bound in STATE_BYTES.items():
        own = _named(found, name)
        yield Check(_STATE, f"{name}: bytes a parameter", own.state_bytes, bound, own.note)
    for name in (OWN_OPERATOR, OWN_COMPILED):
        own = _named(found, name)
        for peer, time_bound in ((TORCHAO_8BIT, _OF_PUBLIC), (BITSANDBYTES_8BIT, _OF_PUBLIC), (FUSED, _OF_FUSED)):
            base = _named(found, peer)
            if base.seconds:
                ratio = median_ratio(own.seconds, base.seconds)
                yield Check(peer, f"{name}: time", ratio, time_bound, own.note)


def _named(found: Sequence[UpdateFigures], name: str) -> UpdateFigures:
    return next((figures for figures in found if figures.name == name), UpdateFigures(name))
