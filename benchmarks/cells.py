"""Figures as table cells; what was not measured is an empty cell."""

from __future__ import annotations

from graphopt.ir.units import format_bytes, format_seconds


def bytes_cell(num_bytes: int | None) -> str:
    """``1.50 MiB``."""
    return "" if num_bytes is None else format_bytes(num_bytes)


def seconds_cell(seconds: float | None) -> str:
    """``12.3 ms``."""
    return "" if seconds is None else format_seconds(seconds)


def ratio_cell(figure: float | None, base: float | None) -> str:
    """``figure / base`` with two digits."""
    return "" if figure is None or not base else f"{figure / base:.2f}"
