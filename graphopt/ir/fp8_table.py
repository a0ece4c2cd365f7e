"""Which matrix products run in FP8 and why: a table that tag-fp8 writes, insert-quantize acts on, and people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphopt.ir.fp8_trained import NOTHING_TRAINED, Decision, ForwardProduct, TrainedForward
from graphopt.ir.fp8_watch import NOTHING_WATCHED, Fp8Watch
from graphopt.ir.origin import NO_ORIGIN, Origin
from graphopt.ir.units import format_bytes, format_microseconds

NO_PAD = (0, 0, 0)


@dataclass(frozen=True)
class Fp8Row:
    """One product ``[rows, contraction] @ [contraction, columns]``, ``batch`` times. ``value``: its node's name;
    ``role``: which of a layer's products; ``is_fp8``: whether it runs in FP8; ``weights``: the parameters that it
    reads, or whose gradient it is; ``layer``: what the products of one layer share.

    ``pad``: zeros to add to rows, columns and contraction before it can run. Seconds are estimated, 0 where costs are
    not counted: ``bf16_seconds`` and ``fp8_seconds`` of the product alone, ``quantize_seconds`` its share of what its
    operands cost to quantize. ``bytes_saved``: of what is kept for the backward part.
    """

    value: str
    role: str
    rows: int
    columns: int
    contraction: int
    is_fp8: bool
    reason: str
    origin: Origin = NO_ORIGIN
    weights: tuple[str, ...] = ()
    pad: tuple[int, int, int] = NO_PAD
    batch: int = 1
    layer: str = ""
    operator: str = ""
    bf16_seconds: float = 0.0
    fp8_seconds: float = 0.0
    quantize_seconds: float = 0.0
    bytes_saved: int = 0

    @property
    def module(self) -> str:
        """The path of the module that the product belongs to."""
        return self.origin.module

    @property
    def seconds_saved(self) -> float:
        """What FP8 saves, quantization counted; negative where it would be slower."""
        return self.bf16_seconds - self.fp8_seconds - self.quantize_seconds

    @property
    def shape(self) -> str:
        """Rows, columns and contraction as people read them."""
        if not (self.rows or self.columns or self.contraction):
            return "no one size"
        times = f"{self.batch} of " if self.batch != 1 else ""
        return f"{times}{self.rows} x {self.columns} x {self.contraction}"

    @property
    def padded_to(self) -> str:
        """Rows, columns and contraction after padding; empty where nothing is padded."""
        if self.pad == NO_PAD:
            return ""
        sizes = (self.rows, self.columns, self.contraction)
        return " x ".join(str(size + more) for size, more in zip(sizes, self.pad, strict=True))

    @property
    def times(self) -> str:
        """Both times as people read them; empty where costs are not counted."""
        if not self.bf16_seconds:
            return ""
        return (
            f"{format_microseconds(self.bf16_seconds)} in bf16, {format_microseconds(self.fp8_seconds)} in FP8 and "
            f"{format_microseconds(self.quantize_seconds)} to quantize"
        )

    def __str__(self) -> str:
        """The row on one line, without its module."""
        decision = "FP8" if self.is_fp8 else "not FP8"
        notes = [self.reason, self.times]
        if self.bytes_saved:
            notes.append(f"{format_bytes(self.bytes_saved)} less kept for the backward part")
        return f"{self.role} {self.value} ({self.shape}): {decision}: {'; '.join(filter(None, notes))}"


@dataclass(frozen=True)
class Fp8Table:
    """The rows of a program, in order; empty where no recipe was asked for. ``recipe``, ``device``: as people read
    them. ``watch``: which tensors are looked at when they are quantized. ``trained``: what training had decided when an
    evaluation was made.
    """

    recipe: str = ""
    device: str = ""
    rows: tuple[Fp8Row, ...] = ()
    watch: Fp8Watch = NOTHING_WATCHED
    trained: TrainedForward = field(default=NOTHING_TRAINED, compare=False)

    @property
    def eligible(self) -> tuple[Fp8Row, ...]:
        """The products that run in FP8."""
        return tuple(row for row in self.rows if row.is_fp8)

    @property
    def seconds_saved(self) -> float:
        """What all FP8 products save together."""
        return sum(row.seconds_saved for row in self.eligible)

    @property
    def bytes_saved(self) -> int:
        """What all FP8 products keep less for the backward part."""
        return sum(row.bytes_saved for row in self.eligible)

    def named(self, value: str) -> Fp8Row | None:
        """The row of the product called ``value``."""
        return next((row for row in self.rows if row.value == value), None)

    def tells(self, value: str, reason: str) -> bool:
        """Whether the row of ``value`` gives ``reason``."""
        return any(row.value == value and row.reason == reason for row in self.rows)

    def within(self, path: str) -> tuple[Fp8Row, ...]:
        """The rows of the module at ``path`` and of those below it, by layer."""
        return tuple(
            row for row in self.by_layer() if path and (row.module == path or row.module.startswith(f"{path}."))
        )

    def reading(self, parameter: str) -> tuple[Fp8Row, ...]:
        """The rows of products that read ``parameter`` or make its gradient."""
        return tuple(row for row in self.rows if parameter in row.weights)

    def forward_decisions(self) -> tuple[tuple[ForwardProduct, Decision], ...]:
        """The forward products of this table, in order, with what is decided about each."""
        return tuple(
            (
                ForwardProduct(row.module, row.weights, (row.rows, row.columns, row.contraction)),
                Decision(row.is_fp8, row.reason),
            )
            for row in self.rows
            if row.role == "forward"
        )

    def follows(self, trained: TrainedForward) -> bool:
        """Whether an evaluation of this table is as ``trained`` has it: each forward product in FP8 or not as it was
        decided when the table was made, by training or else here.
        """
        if trained is self.trained:  # asked at every evaluation: mostly nothing was compiled in between
            return True
        decided = self.forward_decisions()
        products = [product for product, _ in decided]
        made = zip(decided, self.trained.about(products), trained.about(products), strict=True)
        return all((now or own).is_fp8 == (then or own).is_fp8 for (_, own), then, now in made)

    def by_layer(self) -> tuple[Fp8Row, ...]:
        """The rows with the products of each layer together, in the order of its first one."""
        order: dict[str, list[Fp8Row]] = {}
        for row in self.rows:
            order.setdefault(row.layer or row.value, []).append(row)
        return tuple(row for rows in order.values() for row in rows)

    def summary(self) -> str:
        """How many products run in FP8 on what, and what that saves, on one line."""
        if not self.rows:
            return "no FP8 was asked for"
        verb = "saves" if self.seconds_saved > 0 else "costs"
        times = f"{verb} {format_microseconds(abs(self.seconds_saved))}"
        saved = f", {times} (estimated)" if self.seconds_saved else ""
        kept = f", {format_bytes(self.bytes_saved)} less kept for the backward part" if self.bytes_saved else ""
        return (
            f"FP8, recipe {self.recipe}, on {self.device}: {len(self.eligible)} of {len(self.rows)} products"
            f"{saved}{kept}"
        )

    def text(self) -> str:
        """The summary and all rows as text, one a line, in columns."""
        head = ("module", "product", "value", "M x N x K", "FP8", "bf16 us", "FP8 us", "quantize us", "bytes", "reason")
        return "\n".join([self.summary(), "", *_columns([head, *map(row_cells, self.by_layer())])]) + "\n"


def row_cells(row: Fp8Row) -> tuple[str, ...]:
    """The cells of a row, as text: module, role, value, sizes, decision, times in microseconds, bytes, reason."""
    seconds = (row.bf16_seconds, row.fp8_seconds, row.quantize_seconds)
    times = tuple(f"{value * 1e6:,.1f}" if row.bf16_seconds else "-" for value in seconds)
    saved = format_bytes(row.bytes_saved) if row.bytes_saved else "-"
    return row.module or "-", row.role, row.value, row.shape, "yes" if row.is_fp8 else "no", *times, saved, row.reason


def _columns(lines: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True))
        yield "  ".join(cells).rstrip()
