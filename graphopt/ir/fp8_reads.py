"""What FP8 products read: which matrix, quantized how, in which layout; views of one matrix are one.

A product contracts its left operand along dimension 1 and its right one along dimension 0. Seen from the matrix as it
is stored, behind transpositions, that is one of two: *straight* codes have its dimension 1 contiguous, *turned* ones
are those of its transpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.fp8 import Recipe
from graphopt.ir import ops
from graphopt.ir.fp8_grids import Grid, format_of, grid_of, transposed
from graphopt.ir.fp8_products import Operand, OperandKind, Product, is_transposition
from graphopt.ir.program import Program

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)
"""What can be quantized to FP8."""


@dataclass(frozen=True)
class Matrix:
    """A 2-D value: ``source`` holds its elements in row-major order, in whatever shape."""

    source: fx.Node
    rows: int
    columns: int


@dataclass(frozen=True)
class Read:
    """How one operand of a product is read.

    ``matrix``: what is quantized; ``value``: the 2-D node that has it, of which others may exist. ``is_transposed``:
    whether the operand is its transpose. ``format``, ``grid``: of the codes; ``grid`` is that of ``value`` as it lies.
    ``is_turned``: whether the codes are those of the transpose, contiguous.
    """

    matrix: Matrix
    value: fx.Node
    is_transposed: bool
    is_weight: bool
    format: str
    grid: Grid
    is_turned: bool

    @property
    def operand_grid(self) -> Grid:
        """The grid of the operand as the product reads it."""
        return transposed(self.grid) if self.is_transposed else self.grid

    @property
    def codes_are_transposed(self) -> bool:
        """Whether the operand is the transpose of the codes as they are stored."""
        return self.is_transposed != self.is_turned


@dataclass(frozen=True)
class ProductReads:
    """The reads of both operands of a product."""

    product: Product
    a: Read
    b: Read


def reads_of(product: Product, recipe: Recipe, *, two_layouts: bool) -> ProductReads:
    """How ``product`` reads its operands; ``two_layouts``: only with the contraction contiguous."""
    a = _read(product.a, 1, recipe, two_layouts)
    b = _read(product.b, 0, recipe, two_layouts)
    return ProductReads(product, a, b)


def _read(operand: Operand, contraction_dim: int, recipe: Recipe, two_layouts: bool) -> Read:
    value, is_transposed = _stored(operand)
    rows, columns = value.meta["val"].shape
    stored_dim = 1 - contraction_dim if is_transposed else contraction_dim
    return Read(
        matrix=Matrix(_row_major_source(value), rows, columns),
        value=value,
        is_transposed=is_transposed,
        is_weight=operand.kind is OperandKind.WEIGHT,
        format=format_of(recipe, operand.kind),
        grid=grid_of(recipe, operand.kind, stored_dim),
        is_turned=two_layouts and stored_dim == 0,
    )


def _stored(operand: Operand) -> tuple[fx.Node, bool]:
    """The 2-D value behind copies and transpositions, for a weight also behind conversions; whether transposed."""
    node, is_transposed = operand.base, operand.is_transposed
    while True:
        if is_transposition(node):
            is_transposed = not is_transposed
        elif not _is_same_matrix(node) and not (operand.kind is OperandKind.WEIGHT and _is_rounding(node)):
            return node, is_transposed
        node = node.all_input_nodes[0]


def _is_same_matrix(node: fx.Node) -> bool:
    """Whether ``node`` is a copy or view of a matrix in its own shape."""
    if not ops.keeps_order(node):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return source.dtype == value.dtype and source.shape == value.shape


def _is_rounding(node: fx.Node) -> bool:
    """Whether ``node`` converts one type that can be quantized to another, on the same device."""
    if not ops.is_conversion(node):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return source.device == value.device and source.dtype in QUANTIZABLE


def _row_major_source(node: fx.Node) -> fx.Node:
    """The first value that has the elements of ``node`` in the same row-major order."""
    while ops.keeps_order(node) and node.all_input_nodes[0].meta["val"].dtype == node.meta["val"].dtype:
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class Copy:
    """Codes of a matrix in one format, on one grid, in one layout: what is made once and read by many."""

    matrix: Matrix
    format: str
    grid: Grid
    is_turned: bool

    @classmethod
    def read_by(cls, read: Read) -> Copy:
        """The copy that serves ``read``."""
        return cls(read.matrix, read.format, read.grid, read.is_turned)


@dataclass(frozen=True)
class Request:
    """A copy with where it is made: from ``value``, before ``anchor``, which is no later than its first reader."""

    copy: Copy
    value: fx.Node
    anchor: fx.Node


def requests_of(program: Program, reads: Iterable[ProductReads]) -> tuple[Request, ...]:
    """The copies that ``reads`` (in graph order) need, each once.

    One of an activation or gradient is made where the value is; one of a weight before its first reader.
    """
    found: dict[Copy, Request] = {}
    for item in reads:
        for read in (item.a, item.b):
            copy = Copy.read_by(read)
            if copy not in found:
                anchor = item.product.node if read.is_weight else _behind(program, read.value)
                found[copy] = Request(copy, read.value, anchor)
    return tuple(found.values())


def _behind(program: Program, node: fx.Node) -> fx.Node:
    """Where something that reads ``node`` can be put first."""
    return node.next if node.op == "call_function" else program.ops()[0]
