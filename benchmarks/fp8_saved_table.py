"""What a Llama block was measured to keep for its backward part, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.cells import bytes_cell, ratio_cell
from benchmarks.rows import Row

# Of queries. A block with as many key heads needs no word about them.
HEADS = 8


@dataclass(frozen=True)
class SavedFigures:
    """One block: bytes that wait for the backward part, decibels of the worst gradient, and the measured peak of two.

    ``base_bytes``: what bf16 leaves of activations. ``saving_decibels``: None where nothing is kept in FP8.
    """

    precision: str
    saved: str
    key_value_heads: int
    activation_bytes: int
    weight_bytes: int
    base_bytes: int
    decibels: float
    worst: str
    saving_decibels: float | None
    peak_bytes: int


def saved_table(rows: Sequence[Row[SavedFigures]], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each precision and choice."""
    table = Table("block", "precision", "saved", box=layout)
    for heading in (
        "activations",
        "of bf16's",
        "weights' copies",
        "dB to fp32",
        "worst",
        "dB by saving",
        "peak of two",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = row.figures
        heads = "" if figures.key_value_heads == HEADS else f", {figures.key_value_heads} key heads"
        table.add_row(
            f"{row.subject.model}{heads}",
            figures.precision,
            figures.saved,
            bytes_cell(figures.activation_bytes),
            ratio_cell(figures.activation_bytes, figures.base_bytes),
            bytes_cell(figures.weight_bytes),
            f"{figures.decibels:.1f}",
            figures.worst.removesuffix(".weight"),
            "" if figures.saving_decibels is None else f"{figures.saving_decibels:.1f}",
            bytes_cell(figures.peak_bytes),
        )
    return table
