"""The FP8 table as text and HTML: which products run in FP8, why and by what, and the lines of ``explain``."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from graphopt.ir.fp8_table import Fp8Row, Fp8Table, row_cells
from graphopt.kernels.fp8_matmul import choices_on, matmul_path
from graphopt.kernels.fp8_support import support_on

if TYPE_CHECKING:
    from graphopt.kernels.fp8_matmul_choice import Choice

_MOST_LINES = 12

NO_PRODUCT = "no matrix product: softmax, normalisation, activation functions and loss reductions are never in FP8"

_HEADINGS = ("module", "product", "value", "M x N x K", "FP8", "bf16 us", "FP8 us", "quantize us", "kept less", "why")
_NUMBERS = ("bf16 us", "FP8 us", "quantize us", "kept less")


def product_lines(table: Fp8Table, device: torch.device) -> tuple[str, ...]:
    """How the FP8 products of ``table`` are computed on ``device``; on a GPU also what was chosen so far, and why."""
    if not table.eligible:
        return ()
    support = support_on(device)
    where = "" if support.is_emulated else f" on {device}"
    return (
        f"FP8 products{where}: {matmul_path(support)}",
        *(choice_line(choice) for choice in choices_on(device)),
    )


def choice_line(choice: Choice) -> str:
    """What computes a class of shapes, the times it was chosen by, and what else is to be said."""
    times = ", ".join(
        f"{name} {'failed' if value is None else f'{value:.3g} ms'}" for name, value in choice.milliseconds.items()
    )
    return "; ".join([f"FP8 products {choice.shapes}: {choice.implementation} ({times})", *choice.notes])


def fp8_text(table: Fp8Table, lines: Sequence[str] = ()) -> list[str | Table]:
    """The parts of the text report: how many products of each kind run in FP8 and why; empty without FP8.

    ``lines``: by what they are computed.
    """
    if not table.rows:
        return []
    counts: dict[tuple[bool, str], list[Fp8Row]] = {}
    for row in table.rows:
        counts.setdefault((row.is_fp8, row.reason), []).append(row)
    roles = tuple(dict.fromkeys(row.role for row in table.rows))
    shown = Table("FP8", "why")
    for role in roles:
        shown.add_column(role, justify="right")
    shown.add_column("first")
    for (is_fp8, reason), rows in counts.items():
        numbers = (str(sum(row.role == role for row in rows) or "") for role in roles)
        shown.add_row("yes" if is_fp8 else "no", reason, *numbers, rows[0].module or rows[0].value)
    more = [f"and {len(lines) - _MOST_LINES} more classes of shapes"] if len(lines) > _MOST_LINES else []
    return [table.summary(), *lines[:_MOST_LINES], *more, shown]


def fp8_html(table: Fp8Table, lines: Sequence[str] = ()) -> str:
    """A table of every product, the three of each layer together; empty without FP8.

    ``lines``: by what they are computed.
    """
    if not table.rows:
        return ""
    head = "".join(f'<th class="{_css(heading)}">{heading}</th>' for heading in _HEADINGS)
    body = "".join(map(_html_row, table.by_layer()))
    paragraphs = "".join(f'<p class="muted">{escape(line)}</p>' for line in (table.summary(), *lines))
    return f'{paragraphs}<table id="fp8"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def module_lines(table: Fp8Table, path: str) -> list[str]:
    """What the products in the module at ``path`` run in and why; or that it has none."""
    if not table.rows:
        return []
    return _lines(table.within(path)) or [f"  FP8: {NO_PRODUCT}"]


def parameter_lines(table: Fp8Table, parameter: str) -> list[str]:
    """What the products of ``parameter`` run in and why; empty where there are none."""
    return _lines(table.reading(parameter))


def value_lines(table: Fp8Table, value: str) -> list[str]:
    """What the product called ``value`` runs in and why; empty for other values."""
    row = table.named(value)
    return [] if row is None else _lines((row,))


def _lines(rows: tuple[Fp8Row, ...]) -> list[str]:
    lines = [f"  FP8: {row}" for row in rows[:_MOST_LINES]]
    return lines if len(rows) <= _MOST_LINES else [*lines, f"  and {len(rows) - _MOST_LINES} more products"]


def _html_row(row: Fp8Row) -> str:
    cells = zip(_HEADINGS, row_cells(row), strict=True)
    body = "".join(f'<td class="{_css(heading)}">{escape(cell)}</td>' for heading, cell in cells)
    return f'<tr class="fp8" data-fp8="{str(row.is_fp8).lower()}">{body}</tr>'


def _css(heading: str) -> str:
    return "number" if heading in _NUMBERS else ""
