"""Rows of FP8 products, as a table, and what they must show, as checks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from rich import box
from rich.table import Table

from benchmarks.acceptance import Check
from benchmarks.cells import ratio_cell, seconds_cell
from benchmarks.rows import Row

# Of a result in bfloat16, whose rounding alone leaves about 56. An implementation below sums or scales wrongly.
LEAST_DECIBELS = 50.0
BFLOAT16_PRODUCT = "torch.mm"


@dataclass(frozen=True)
class ProductFigures:
    """One way to compute a product. ``device`` in words; ``decibels`` from the exact product of the codes.

    ``note`` says why figures are missing.
    """

    recipe: str
    implementation: str
    device: str
    seconds: tuple[float, ...] = ()
    decibels: float | None = None
    note: str = ""

    @property
    def median_seconds(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.seconds) if self.seconds else None


def product_table(rows: Sequence[Row[ProductFigures]], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each row; ratios are those of medians to the bfloat16 product of the same shape."""
    table = Table("M x N x K", "scales", "implementation", box=layout)
    for heading in ("median", "TFLOP/s", "of bf16", "decibels"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    bases: dict[str, float | None] = {}
    for row in rows:
        shape, figures = row.subject.model, row.figures
        median = figures.median_seconds
        bases.setdefault(shape, median)
        table.add_row(
            shape,
            figures.recipe,
            figures.implementation,
            seconds_cell(median),
            "" if median is None else f"{2e-12 * prod(map(int, shape.split('x'))) / median:.3g}",
            ratio_cell(median, bases[shape]),
            "" if figures.decibels is None else f"{figures.decibels:.1f}",
            figures.note,
        )
    return table


def product_checks(rows: Sequence[Row[ProductFigures]]) -> Iterator[Check]:
    """That every implementation computes the product; one that did not run at all counts as not met."""
    for row in rows:
        figures = row.figures
        if figures.implementation == BFLOAT16_PRODUCT:
            continue
        share = None if figures.decibels is None else LEAST_DECIBELS / figures.decibels
        what = f"{row.subject.model} {figures.recipe}, {figures.implementation}: least decibels over those found"
        yield Check("exact product", what, share, 1.0, figures.note)
