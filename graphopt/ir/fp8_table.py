"""Which matrix products run in FP8 and why: a table that tag-fp8 writes, insert-quantize acts on, and people read."""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.ir.fp8_watch import NOTHING_WATCHED, Fp8Watch
from graphopt.ir.origin import NO_ORIGIN, Origin


@dataclass(frozen=True)
class Fp8Row:
    """One product ``[rows, contraction] @ [contraction, columns]``. ``value``: its node's name; ``role``: which of a
    layer's products; ``is_fp8``: whether it runs in FP8; ``weights``: the parameters among its operands.

    ``seconds_saved``: estimated, negative where FP8 would be slower; ``bytes_saved``: of what is kept for the backward
    part.
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
    seconds_saved: float = 0.0
    bytes_saved: int = 0

    @property
    def module(self) -> str:
        """The path of the module that the product belongs to."""
        return self.origin.module


@dataclass(frozen=True)
class Fp8Table:
    """The rows of a program, in order; empty where no recipe was asked for. ``recipe``, ``device``: as people read
    them. ``watch``: which tensors are looked at when they are quantized.
    """

    recipe: str = ""
    device: str = ""
    rows: tuple[Fp8Row, ...] = ()
    watch: Fp8Watch = NOTHING_WATCHED

    @property
    def eligible(self) -> tuple[Fp8Row, ...]:
        """The products that run in FP8."""
        return tuple(row for row in self.rows if row.is_fp8)

    def named(self, value: str) -> Fp8Row | None:
        """The row of the product called ``value``."""
        return next((row for row in self.rows if row.value == value), None)
