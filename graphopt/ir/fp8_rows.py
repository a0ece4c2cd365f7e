"""FP8 codes for keeping a value whole: a matrix of its elements in the order of memory, and the value again."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.ir.fp8_codes import Codes
from graphopt.ir.fp8_grids import BLOCK, Grid, transposed
from graphopt.ir.memory_order import as_rows, memory_order, rows_again
from graphopt.ir.program import Program
from graphopt.ir.twins import insert_twin
from graphopt.operators.fp8 import DEQUANTIZE, QUANTIZE

aten = torch.ops.aten

KEPT_GRID: Grid = (1, BLOCK)
"""A scale for each 128 elements: an outlier costs its neighbours their digits, not the whole tensor."""

_SCALE_BYTES = 4
_MOST_KEPT = 0.75
"""Codes and scales may take at most so much of what the value takes; more is not worth two passes over it."""


@dataclass(frozen=True)
class Rows:
    """Codes f8[M,K] and scale f32 of a value whose elements in the order of memory they are; ``is_turned``: those of
    the transpose are. ``made``: the call that was added to make them, if one was."""

    codes: fx.Node
    scale: fx.Node
    grid: Grid
    is_turned: bool = False
    made: fx.Node | None = None

    @property
    def nbytes(self) -> int:
        """What keeping them takes."""
        return sum(node.meta["val"].nbytes for node in (self.codes, self.scale))


def covers(program: Program, codes: Codes, base: fx.Node) -> bool:
    """Whether ``codes`` are of all elements of ``base`` in the memory that it fills."""
    spec, source = program.spec(base), program.spec(codes.source)
    return source.numel == spec.numel and memory_order(spec) is not None and memory_order(source) is not None


def rows_of(program: Program, codes: Codes) -> Rows:
    """The Rows that ``codes`` are."""
    lies_turned = memory_order(program.spec(codes.source)) == (1, 0)
    return Rows(codes.codes, codes.scale, codes.grid, is_turned=lies_turned != codes.is_transposed)


def objection_to_rows(program: Program, base: fx.Node) -> str | None:
    """Why no Rows can be made of ``base``, or None."""
    spec = program.spec(base)
    if memory_order(spec) is None:
        return "its elements do not fill the memory that holds them"
    columns = _columns(program, base)
    kept = spec.numel + _SCALE_BYTES * (spec.numel // columns) * -(-columns // BLOCK)
    return "its scales would take too much" if kept > _MOST_KEPT * spec.nbytes else None


def make_rows(program: Program, base: fx.Node) -> Rows:
    """New Rows of ``base``, made right behind it: E4M3, scales that are powers of two."""
    anchor = base.next
    matrix = as_rows(program, base, _columns(program, base), anchor)
    pair = program.insert_before(anchor, QUANTIZE, matrix, "e4m3", list(KEPT_GRID), True, origin_of=base)
    codes, scale = (program.insert_before(anchor, operator.getitem, pair, i, origin_of=base) for i in (0, 1))
    return Rows(codes, scale, KEPT_GRID, made=pair)


def value_again(program: Program, rows: Rows, base: fx.Node, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``base`` as ``rows`` have it, before ``anchor``, and the call that dequantizes it."""
    dtype = program.spec(base).dtype
    codes, scale, grid = rows.codes, rows.scale, rows.grid
    if rows.is_turned:
        codes, scale = (insert_twin(program, anchor, base, aten.t.default, part) for part in (codes, scale))
        grid = transposed(grid)
    matrix = insert_twin(program, anchor, base, DEQUANTIZE, codes, scale, list(grid), dtype)
    return rows_again(program, matrix, base, anchor), matrix


def _columns(program: Program, base: fx.Node) -> int:
    """The columns of the matrix: stretches of 128 elements in memory; the innermost dimension where none fit."""
    spec = program.spec(base)
    order = memory_order(spec)
    assert order, f"{base.name} was found dense"
    return BLOCK if spec.numel % BLOCK == 0 else spec.shape[order[-1]]
