"""In which dtype each operator runs and why: a table that the lowering writes and people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphopt.ir.origin import NO_ORIGIN, Origin


@dataclass(frozen=True)
class PrecisionRow:
    """One operator of the forward part. ``value``: its node's name there; ``operator``: as dumps print it; ``role``:
    what it is to mixed precision; ``dtype``: of its operands and result, as dumps print it (``f32 -> bf16``: computed
    in the first, kept in the second); ``weights``: the parameters among its operands.
    """

    value: str
    operator: str
    role: str
    dtype: str
    reason: str
    origin: Origin = NO_ORIGIN
    weights: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The path of the module it runs in."""
        return self.origin.module

    def __str__(self) -> str:
        return f"{self.operator} {self.value} in {self.dtype}: {self.reason}"


@dataclass(frozen=True)
class PrecisionTable:
    """The rows of a program, in order; empty where nothing was lowered. ``compute``: the type asked for."""

    compute: str = "fp32"
    rows: tuple[PrecisionRow, ...] = ()

    def within(self, path: str) -> tuple[PrecisionRow, ...]:
        """The rows of the module at ``path`` and of those below it."""
        return tuple(row for row in self.rows if row.module == path or row.module.startswith(f"{path}."))

    def reading(self, parameter: str) -> tuple[PrecisionRow, ...]:
        """The rows of operators that read ``parameter``."""
        return tuple(row for row in self.rows if parameter in row.weights)

    def at(self, value: str, origin: Origin) -> tuple[PrecisionRow, ...]:
        """The row of ``value``; or, as differentiation gives values new names, those of the same line of the model."""
        named = tuple(row for row in self.rows if row.value == value and row.origin == origin)
        if named or not origin.module:
            return named
        return tuple(row for row in self.rows if row.origin.place == origin.place)

    def counts(self) -> tuple[tuple[str, str, int], ...]:
        """(dtype, reason, how many operators), the most frequent first."""
        found: dict[tuple[str, str], int] = {}
        for row in self.rows:
            found[row.dtype, row.reason] = found.get((row.dtype, row.reason), 0) + 1
        ordered = sorted(found.items(), key=lambda item: -item[1])
        return tuple((dtype, reason, count) for (dtype, reason), count in ordered)

    def text(self) -> str:
        """All rows as text, one a line, in columns."""
        head = ("operator", "value", "dtype", "reason", "from")
        lines = [head, *((r.operator, r.value, r.dtype, r.reason, str(r.origin)) for r in self.rows)]
        return "\n".join(_columns(lines)) + "\n"


def _columns(lines: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True))
        yield "  ".join(cells).rstrip()
