"""Padding of quantized matrices with zeros, and taking the result of a padded product back to its size.

The codes are padded, not the values: one byte an element is copied, readers that need no padding share the codes, and
no scale changes. Zero is the same code in both formats; a group of zeros alone has scale 1, by the rule of scales.
"""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.fp8_grids import Grid
from graphopt.ir.program import Program

aten = torch.ops.aten

NO_PAD = (0, 0)
_ONES = 1.0


def is_padding(node: fx.Node) -> bool:
    """Whether ``node`` is its first argument with a constant around it."""
    return ops.is_call(node, aten.constant_pad_nd.default)


def pad_matrix(program: Program, anchor: fx.Node, matrix: fx.Node, added: tuple[int, int], fill: float) -> fx.Node:
    """``matrix`` with ``added`` rows and columns of ``fill`` behind its own, made before ``anchor``; or itself."""
    if added == NO_PAD:
        return matrix
    rows, columns = added
    return program.insert_before(
        anchor, aten.constant_pad_nd.default, matrix, [0, columns, 0, rows], fill, origin_of=matrix
    )


def pad_scale(
    program: Program, anchor: fx.Node, scale: fx.Node, grid: Grid, *, shape: tuple[int, int], added: tuple[int, int]
) -> fx.Node:
    """The scales of codes of ``shape`` that get ``added`` rows and columns: with 1 for groups of zeros alone."""
    more = tuple(
        -(-(extent + extra) // size) - -(-extent // size) if size else 0
        for extent, extra, size in zip(shape, added, grid, strict=True)
    )
    return pad_matrix(program, anchor, scale, (more[0], more[1]), _ONES)


def pad_bias(program: Program, anchor: fx.Node, bias: fx.Node | None, columns: int) -> fx.Node | None:
    """``bias`` [N] for a product with ``columns`` more."""
    if bias is None or not columns:
        return bias
    return program.insert_before(anchor, aten.constant_pad_nd.default, bias, [0, columns], 0.0)


def cut_back(program: Program, anchor: fx.Node, product: fx.Node, rows: int, columns: int) -> fx.Node:
    """The first ``rows`` and ``columns`` of ``product``, in memory of its own."""
    shape = program.spec(product).shape
    if shape == (rows, columns):
        return product
    cut = product
    for dim, extent in enumerate((rows, columns)):
        if shape[dim] != extent:
            cut = program.insert_before(anchor, aten.slice.Tensor, cut, dim, 0, extent)
    return program.insert_before(anchor, aten.clone.default, cut, memory_format=torch.contiguous_format)
