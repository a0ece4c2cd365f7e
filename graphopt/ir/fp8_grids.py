"""In which format and with which grid of scales an operand of a product is quantized, by recipe."""

from __future__ import annotations

from graphopt.fp8 import Blockwise, Recipe, Rowwise
from graphopt.ir.fp8_products import OperandKind

Grid = tuple[int, int]

ONE_SCALE: Grid = (0, 0)
BLOCK = 128


def format_of(recipe: Recipe, kind: OperandKind) -> str:
    """The format of an operand of ``kind``."""
    return recipe.gradients if kind is OperandKind.GRADIENT else "e4m3"


def grid_of(recipe: Recipe, kind: OperandKind, contraction_dim: int) -> Grid:
    """How scales are shared in an operand of ``kind``, a matrix that is summed over ``contraction_dim``."""
    if isinstance(recipe, Rowwise):
        return (1, 0) if contraction_dim == 1 else (0, 1)
    if isinstance(recipe, Blockwise):
        if kind is OperandKind.WEIGHT:
            return BLOCK, BLOCK
        return (1, BLOCK) if contraction_dim == 1 else (BLOCK, 1)
    return ONE_SCALE


def transposed(grid: Grid) -> Grid:
    """The grid of the transpose."""
    rows, columns = grid
    return columns, rows
