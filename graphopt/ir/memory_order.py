"""A dense value as a matrix of its elements in the order of memory, and back: both are views."""

from __future__ import annotations

import math

import torch
from torch import fx

from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec
from graphopt.ir.twins import insert_twin

aten = torch.ops.aten


def memory_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost; None if there are gaps or overlaps."""
    order = tuple(sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], dim)))
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] != 1 and spec.stride[dim] != expected:
            return None
        expected *= spec.shape[dim]
    return order


def as_rows(program: Program, value: fx.Node, columns: int, anchor: fx.Node) -> fx.Node:
    """The elements of a dense ``value`` in the order of memory, as a matrix of ``columns`` columns."""
    spec = program.spec(value)
    order = memory_order(spec)
    assert order is not None, f"{value.name} is not dense"
    if order != tuple(range(len(order))):
        value = program.insert_before(anchor, aten.permute.default, value, list(order), origin_of=value)
    shape = [math.prod(spec.shape) // columns, columns]
    if tuple(shape) == tuple(program.spec(value).shape):
        return value
    return program.insert_before(anchor, aten.view.default, value, shape, origin_of=value)


def rows_again(program: Program, matrix: fx.Node, original: fx.Node, anchor: fx.Node) -> fx.Node:
    """A value with shape and layout of the dense ``original`` with the elements of ``matrix`` in memory."""
    spec = program.spec(original)
    order = memory_order(spec)
    assert order is not None, f"{original.name} is not dense"
    shape = [spec.shape[dim] for dim in order]
    if tuple(shape) != tuple(program.spec(matrix).shape):
        matrix = insert_twin(program, anchor, original, aten.view.default, matrix, shape)
    if order == tuple(range(len(order))):
        return matrix
    inverse = [order.index(dim) for dim in range(len(order))]
    return insert_twin(program, anchor, original, aten.permute.default, matrix, inverse)
