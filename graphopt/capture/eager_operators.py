"""Operators that export replaces by others with different rounding: put back what eager runs."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program

aten = torch.ops.aten


def use_eager_operators(program: Program) -> None:
    """Put back what eager runs, in place of what export made of it.

    Dropout on a CPU: noise drawn in the input's dtype, scaled, multiplied; ``native_dropout``, which export puts there,
    draws a boolean mask and rounds differently. ``x[:] = y``: ``copy``, which has no derivative, becomes a clone of y.
    """
    _replace_copies(program)
    for node in program.ops():
        if not ops.is_call(node, aten.native_dropout.default) or not ops.is_random(node):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        uses_mask = any(user.args[1] != 0 for user in node.users)
        if program.spec(source).device.type == "cpu" and not uses_mask:
            _replace_dropout(program, node, source, float(node.args[1]))  # type: ignore[arg-type]


def _replace_copies(program: Program) -> None:
    for node in program.ops():
        if not ops.is_call(node, aten.copy.default):
            continue
        source = node.args[1]
        assert isinstance(source, fx.Node)
        spec = program.spec(node)
        if program.spec(source).dtype != spec.dtype:
            source = program.insert_before(node, aten._to_copy.default, source, dtype=spec.dtype)
        if program.spec(source).shape != spec.shape:
            source = program.insert_before(node, aten.expand.default, source, list(spec.shape))
        format_ = torch.contiguous_format if program.value(node).is_contiguous() else torch.preserve_format
        program.replace(node, program.insert_before(node, aten.clone.default, source, memory_format=format_))
    program.refresh()


def _replace_dropout(program: Program, node: fx.Node, source: fx.Node, probability: float) -> None:
    if probability == 1.0:
        zeros = program.insert_before(node, aten.zeros_like.default, source)
        dropped = program.insert_before(node, aten.mul.Tensor, source, zeros)
    else:
        noise = _noise(program, node, source, 1 - probability)
        dropped = program.insert_before(node, aten.mul.Tensor, source, noise)
    for user in list(node.users):
        program.replace(user, dropped)
    program.erase_if_unused(node)


def _noise(program: Program, node: fx.Node, source: fx.Node, keep: float) -> fx.Node:
    """Scaled noise laid out like ``source``: eager fills it in memory order, so the layout decides the draw."""
    with program.fake_mode:
        stride = torch.empty_like(program.value(source)).stride()  # not the source's own: an expanded one has zeros
    by_stride = sorted(range(len(stride)), key=lambda dim: -stride[dim])
    shape_only = program.insert_before(node, aten.detach.default, source)
    if by_stride == sorted(by_stride):
        drawn = program.insert_before(node, aten.bernoulli.p, shape_only, keep)
    else:
        inverse = sorted(range(len(stride)), key=by_stride.__getitem__)
        in_order = program.insert_before(node, aten.permute.default, shape_only, by_stride)
        drawn_in_order = program.insert_before(node, aten.bernoulli.p, in_order, keep)
        drawn = program.insert_before(node, aten.permute.default, drawn_in_order, inverse)
    return program.insert_before(node, aten.div.Scalar, drawn, keep)
