"""Measured times of a device: products in bfloat16 and FP8 by shape, and passes over memory; kept in a file.

``graphopt measure-fp8`` makes the table on the device and keeps it in the user's cache folder, one file for each kind
of device. None is shipped. Between the shapes that were measured, the rate is interpolated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphopt.errors import DataError
from graphopt.fp8 import Blockwise, Recipe, Rowwise
from graphopt.planner.machine_rates import rates_file, write_measured

_NEIGHBOURS = 4
"""Measured shapes that a rate is interpolated from, each by its distance."""


@dataclass(frozen=True)
class MeasuredProduct:
    """Seconds of one shape: in bfloat16, and in FP8 with a scale for each operand, each row, each block."""

    rows: int
    columns: int
    contraction: int
    bf16: float
    tensorwise: float
    rowwise: float
    blockwise: float

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.rows * self.columns * self.contraction


@dataclass(frozen=True)
class MeasuredTable:
    """What was measured on ``device``. ``pass_bytes``: bytes/s that a large pass reads and writes; ``call_seconds``: of
    a pass over nothing.
    """

    device: str
    needs_two_layouts: bool
    pass_bytes: float
    call_seconds: float
    products: tuple[MeasuredProduct, ...]

    def rates(self, recipe: Recipe) -> MeasuredRates:
        """The Rates that ``recipe`` has by this table."""
        scales = "rowwise" if isinstance(recipe, Rowwise) else "tensorwise"
        return MeasuredRates(self, "blockwise" if isinstance(recipe, Blockwise) else scales)


@dataclass(frozen=True)
class MeasuredRates:
    """Rates by a table; ``scales``: which of its FP8 columns."""

    table: MeasuredTable
    scales: str

    @property
    def name(self) -> str:
        """The device, and that it was measured."""
        return f"{self.table.device} (measured)"

    @property
    def needs_two_layouts(self) -> bool:
        """As the device was found."""
        return self.table.needs_two_layouts

    def bf16_seconds(self, rows: int, columns: int, contraction: int) -> float:
        """By the nearest shapes."""
        return self._seconds((rows, columns, contraction), "bf16")

    def fp8_seconds(self, rows: int, columns: int, contraction: int) -> float:
        """By the nearest shapes."""
        return self._seconds((rows, columns, contraction), self.scales)

    def pass_seconds(self, num_bytes: float) -> float:
        """By the measured bandwidth."""
        return self.table.call_seconds + num_bytes / self.table.pass_bytes

    def _seconds(self, sizes: tuple[int, int, int], column: str) -> float:
        """Seconds for the work of ``sizes`` at the rate of the nearest shapes, but a call at least."""
        if not math.prod(sizes):  # an empty batch: no shape is near nothing
            return self.table.call_seconds
        ordered = sorted(self.table.products, key=lambda product: _distance(sizes, product))[:_NEIGHBOURS]
        weights = [1 / (_distance(sizes, product) + 1e-6) for product in ordered]
        logs = [math.log(getattr(product, column) / product.work) for product in ordered]
        per_work = math.exp(sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights))
        return max(math.prod(sizes) * per_work, self.table.call_seconds)


def _distance(sizes: tuple[int, int, int], product: MeasuredProduct) -> float:
    """Between shapes, in doublings."""
    others = (product.rows, product.columns, product.contraction)
    return math.dist([math.log2(size) for size in sizes], [math.log2(size) for size in others])


def table_file(device: str) -> Path:
    """Where the table of ``device`` is kept: beside the rates of this machine."""
    return rates_file().with_name(f"fp8-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json")


def write_table(table: MeasuredTable) -> Path:
    """Keep ``table`` for every later process of this user; returns the file."""
    return write_measured(table_file(table.device), asdict(table))


def read_table(device: str) -> MeasuredTable | None:
    """The table of ``device``; None where it was not measured. DataError for a file that holds no table."""
    path = table_file(device)
    if not path.is_file():
        return None
    try:
        return _table_of(json.loads(path.read_text(encoding="utf-8")), device)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not hold measured FP8 times ({error}): delete it, or run graphopt measure-fp8 again"
        ) from error


def _table_of(found: Mapping[str, Any], device: str) -> MeasuredTable:
    """The table that ``found`` describes; an error of Python's where it is none, or of another device."""
    products = tuple(MeasuredProduct(**product) for product in found["products"])
    table = MeasuredTable(**{**found, "products": products})
    numbers = [table.pass_bytes, table.call_seconds, *(n for product in products for n in asdict(product).values())]
    if not products or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError("there are no products, or a number is not positive")
    if table.device != device or not isinstance(table.needs_two_layouts, bool):
        raise ValueError(
            f"expected device {device!r} and needs_two_layouts true or false, came {table.device!r} and "
            f"{table.needs_two_layouts!r}"
        )
    return table
