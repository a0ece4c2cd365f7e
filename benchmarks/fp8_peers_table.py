"""What FP8 training by torchao and here was measured to need, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.cells import bytes_cell, ratio_cell
from benchmarks.rows import Row


@dataclass(frozen=True)
class PeerFigures:
    """One way to train: bytes of its peak, of what one block adds to it, and its worst gradient.

    ``eager_peak_bytes``, ``eager_block_bytes``: of PyTorch as it comes, in bf16, in the same run.
    """

    way: str
    peak_bytes: int
    block_bytes: int
    eager_peak_bytes: int
    eager_block_bytes: int
    decibels: float
    worst: str


def peers_table(rows: Sequence[Row[PeerFigures]], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each way."""
    table = Table("way", box=layout)
    for heading in ("peak", "of eager's", "a block adds", "of eager's", "dB to fp32", "worst"):
        table.add_column(heading, justify="right")
    for figures in (row.figures for row in rows):
        table.add_row(
            figures.way,
            bytes_cell(figures.peak_bytes),
            ratio_cell(figures.peak_bytes, figures.eager_peak_bytes),
            bytes_cell(figures.block_bytes),
            ratio_cell(figures.block_bytes, figures.eager_block_bytes),
            f"{figures.decibels:.1f}",
            figures.worst.removesuffix(".weight"),
        )
    return table
