"""How much a micro-batch counts in an accumulation window, read from the graph of its loss.

The mean over a window equals the mean over the full batch only if every micro-batch counts with the number of items
its own mean was taken over: valid labels for a cross-entropy, elements for ``mean()``, the divisor for ``sum() / n``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.dataflow import depends_on
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind

aten = torch.ops.aten

_MEAN_REDUCTION = 1
_SUM_REDUCTION = 2


@dataclass(frozen=True)
class LossWeight:
    """``weight``: a node, a number, or None for a sum (no division at all); ``reason`` says how it was found."""

    weight: fx.Node | float | None
    reason: str
    is_proven: bool = True


def find_loss_weight(program: Program, loss: str) -> LossWeight:
    """The LossWeight of output ``loss`` in a joint Program; weight 1 with ``is_proven`` False when not found."""
    node = program.output_named(loss)
    found = _weight_of(program, node)
    if found is not None:
        return found
    return LossWeight(
        1.0,
        f"the loss ends in {node.name} ({node.target}), from which no item count follows: micro-batches count equally",
        is_proven=False,
    )


def _weight_of(program: Program, node: object) -> LossWeight | None:
    while isinstance(node, fx.Node):
        direct = _direct_weight(program, node)
        if direct is not None:
            return direct
        if ops.is_call(node, aten.add.Tensor):
            return _weight_of_sum(program, node)
        node = _scaled_or_reshaped(program, node)
    return None


def _direct_weight(program: Program, node: fx.Node) -> LossWeight | None:
    if ops.is_getitem(node) and node.args[1] == 0:
        return _label_weight(program, node.args[0])  # type: ignore[arg-type]
    if ops.is_call(node, aten.mean.default) or (ops.is_call(node, aten.mean.dim) and program.spec(node).numel == 1):
        count = program.spec(node.args[0]).numel  # type: ignore[arg-type]
        return LossWeight(float(count), f"the loss is a mean over {count} elements")
    if ops.is_call(node, aten.sum.default, aten.sum.dim_IntList) and program.spec(node).numel == 1:
        return LossWeight(None, "the loss is a sum: gradients of the window are summed")
    reduction = _reduction(node)
    if reduction == _MEAN_REDUCTION:
        count = program.spec(node.args[0]).numel  # type: ignore[arg-type]
        return LossWeight(float(count), f"the loss is a mean over {count} elements")
    if reduction == _SUM_REDUCTION:
        return LossWeight(None, "the loss is a sum: gradients of the window are summed")
    return _divisor_weight(program, node)


def _label_weight(program: Program, loss_node: fx.Node) -> LossWeight | None:
    reduction = _reduction(loss_node)
    if not ops.is_call(loss_node, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        return None
    if reduction == _SUM_REDUCTION:
        return LossWeight(None, "the loss is a sum: gradients of the window are summed")
    if reduction != _MEAN_REDUCTION:
        return None
    total = next((user for user in loss_node.users if user.args[1] == 1), None)
    if total is None:
        total = program.insert_before(loss_node.next, ops.getitem, loss_node, 1)
    return LossWeight(
        total, "the loss is a mean over valid labels: each micro-batch counts with its own number of them"
    )


def _reduction(node: fx.Node) -> int | None:
    """The value of an argument called ``reduction``, if the operator has one."""
    op = ops.overload(node)
    if op is None:
        return None
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "reduction":
            return int(ops.argument(node, position, "reduction", argument.default_value))
    return None


def _divisor_weight(program: Program, node: fx.Node) -> LossWeight | None:
    """``sum / n``: the weight is n, a number or a scalar that depends on no parameter."""
    if not ops.is_call(node, aten.div.Tensor, aten.div.Scalar) or len(node.args) != 2:
        return None
    numerator, divisor = node.args
    inner = _weight_of(program, numerator)
    if inner is None or inner.weight is not None:
        return inner if inner is not None and not isinstance(divisor, fx.Node) else None
    if isinstance(divisor, (int, float)):
        return LossWeight(float(divisor), f"the loss is a sum divided by {divisor}")
    if (
        isinstance(divisor, fx.Node)
        and program.spec(divisor).numel == 1
        and not _depends_on_parameters(program, divisor)
    ):
        return LossWeight(divisor, f"the loss is a sum divided by {divisor.name}, which counts its items")
    return None


def _weight_of_sum(program: Program, node: fx.Node) -> LossWeight | None:
    left, right = (_weight_of(program, argument) for argument in node.args[:2])
    if left is not None and right is not None and left.weight == right.weight:
        return left
    return None


def _scaled_or_reshaped(program: Program, node: fx.Node) -> object:
    """The argument that carries the loss through a change of sign, scale, shape or dtype; None for anything else."""
    if ops.is_view(node) or ops.is_call(node, aten._to_copy.default, aten.clone.default, aten.neg.default):
        return node.args[0]
    if ops.is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        left, right = node.args[:2]
        return left if not isinstance(right, fx.Node) else None
    return None


def _depends_on_parameters(program: Program, node: fx.Node) -> bool:
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    return depends_on(program, node, [source for source, entry in inputs if entry.kind is InputKind.PARAM])
