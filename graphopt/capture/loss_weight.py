"""How much a micro-batch counts in an accumulation window, read from the graph of its loss.

The mean over a window equals the mean over the full batch only if every micro-batch counts with the number of items
its own mean was taken over: valid labels for a cross-entropy, elements for ``mean()``, the divisor for ``sum() / n``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.dataflow import depends_on
from graphopt.ir.linear_loss import TOTAL_RESULT, is_linear_loss, named_arguments
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, TensorSpec

aten = torch.ops.aten

_MEAN_REDUCTION = 1
_SUM_REDUCTION = 2
_SUM_REASON = "the loss is a sum: gradients of the window are summed"
_LABEL_REASON = "the loss is a mean over valid labels: each micro-batch counts with its own number of them"
_SAME_SCALE = (aten._to_copy.default, aten.clone.default, aten.neg.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor)
# A divisor is kept from zero by a bound that no count but zero is below.
_LARGEST_LOWER_BOUND = 1.0


@dataclass(frozen=True)
class LossWeight:
    """``weight``: a node, a number, or None for a sum (no division at all); ``reason`` says how it was found."""

    weight: fx.Node | float | None
    reason: str
    is_proven: bool = True


@dataclass(frozen=True)
class _Term:
    """A LossWeight on the way up to the loss; ``divisors``: the constants that a sum has been divided by so far."""

    found: LossWeight
    divisors: tuple[float, ...] = ()
    labels: fx.Node | None = None  # the nll_loss whose valid labels are counted

    @property
    def is_sum(self) -> bool:
        return self.found.weight is None


def find_loss_weight(program: Program, loss: str) -> LossWeight:
    """The LossWeight of output ``loss`` in a joint Program; weight 1 with ``is_proven`` False when not found.

    A sum times a constant stays a sum, unproven, unless the constant divides by the size of a batch tensor.
    """
    node = program.output_named(loss)
    term = _Search(program).term(node)
    if term is not None:
        return term.found
    return LossWeight(
        1.0,
        f"the loss ends in {node.name} ({node.target}), from which no item count follows: micro-batches count equally",
        is_proven=False,
    )


class _Search:
    """Finds terms from the loss backwards."""

    def __init__(self, program: Program) -> None:
        self.program = program
        inputs = list(zip(program.placeholders(), program.signature.inputs, strict=True))
        self.parameters = [node for node, entry in inputs if entry.kind is InputKind.PARAM]
        self.batch = [node for node, entry in inputs if entry.kind is InputKind.BATCH]
        specs = [entry.spec for _, entry in inputs if entry.kind is InputKind.BATCH]
        self.batch_sizes = {
            math.prod(spec.shape[:dims])
            for spec in specs
            if isinstance(spec, TensorSpec)
            for dims in range(1, len(spec.shape) + 1)
        }

    def term(self, node: object) -> _Term | None:
        """The term of scalar ``node`` with its constant divisors settled; None when nothing follows."""
        found = self._open_term(node)
        return None if found is None else self._settled(found)

    def _settled(self, term: _Term) -> _Term:
        if not term.is_sum or not term.divisors:
            return term
        candidates = (math.prod(term.divisors), *sorted(term.divisors, reverse=True))
        for divisor in candidates:
            size = round(divisor) if math.isfinite(divisor) else 0
            if size in self.batch_sizes and math.isclose(divisor, size, rel_tol=1e-6):
                reason = f"the loss is a sum divided by {size}, the size of a batch tensor"
                return _Term(LossWeight(float(size), reason, is_proven=term.found.is_proven))
        reason = (
            f"the loss is a sum times the constant {1 / math.prod(term.divisors):g}, which is no size of a batch "
            "tensor: gradients of the window are summed"
        )
        return _Term(LossWeight(None, reason, is_proven=False))

    def _open_term(self, node: object) -> _Term | None:
        if not isinstance(node, fx.Node) or not isinstance(self.program.value(node), torch.Tensor):
            return None
        if self.program.spec(node).numel != 1:
            return None
        leaf = self._leaf(node)
        if leaf is not None:
            return leaf
        if ops.is_view(node) or ops.is_call(node, *_SAME_SCALE):
            return self._open_term(node.args[0])
        if ops.is_call(node, *_PRODUCTS, *_QUOTIENTS) and len(node.args) == 2:
            return self._scaled(node)
        return self._added(node) if ops.is_call(node, *_SUMS) else None

    # ---- where a loss begins -------------------------------------------------------------------------------------

    def _leaf(self, node: fx.Node) -> _Term | None:
        if ops.is_getitem(node):
            return self._labels(node.args[0]) if node.args[1] == 0 else None  # type: ignore[arg-type]
        reduction = _reduction(node)
        if reduction == _MEAN_REDUCTION or ops.is_call(node, aten.mean.default, aten.mean.dim):
            return self._mean(node.args[0])  # type: ignore[arg-type]
        if reduction == _SUM_REDUCTION:
            return _Term(LossWeight(None, _SUM_REASON))
        if ops.is_call(node, aten.sum.default, aten.sum.dim_IntList):
            return self._sum_over(node.args[0])  # type: ignore[arg-type]
        return None

    def _labels(self, loss_node: fx.Node) -> _Term | None:
        if is_linear_loss(loss_node):
            return self._linear_loss(loss_node)
        if not ops.is_call(loss_node, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
            return None
        reduction = _reduction(loss_node)
        if reduction == _SUM_REDUCTION:
            return _Term(LossWeight(None, _SUM_REASON))
        if reduction != _MEAN_REDUCTION:
            return None
        total = next((user for user in loss_node.users if user.args[1] == 1), None)
        if total is None:
            total = self.program.insert_before(loss_node.next, ops.getitem, loss_node, 1)
        return _Term(LossWeight(total, _LABEL_REASON), labels=loss_node)

    def _linear_loss(self, loss_node: fx.Node) -> _Term | None:
        arguments = named_arguments(loss_node)
        if arguments["reduction"] == _SUM_REDUCTION:
            return _Term(LossWeight(None, _SUM_REASON))
        if arguments["reduction"] != _MEAN_REDUCTION or arguments["z_loss"]:
            return None  # a z-loss is a mean over all rows, the loss one over valid labels
        total = next((user for user in loss_node.users if user.args[1] == TOTAL_RESULT), None)
        if total is None:
            total = self.program.insert_before(loss_node.next, ops.getitem, loss_node, TOTAL_RESULT)
        return _Term(LossWeight(total, _LABEL_REASON))

    def _mean(self, items: fx.Node) -> _Term | None:
        inner = self._sum_over(items)
        if inner is None or isinstance(inner.found.weight, fx.Node):
            return None
        count = self.program.spec(items).numel
        return _mean_term(count if inner.found.weight is None else round(count * inner.found.weight))

    def _sum_over(self, items: fx.Node) -> _Term | None:
        """The term of the sum over ``items``, which may themselves be divided, element by element."""
        if not self.program.spec(items).shape:
            return self._open_term(items)
        if ops.is_view(items) or ops.is_call(items, *_SAME_SCALE):
            return self._sum_over(items.args[0])  # type: ignore[arg-type]
        if ops.is_call(items, aten.mean.dim):
            return self._sum_over_means(items)
        if ops.is_call(items, *_QUOTIENTS) and len(items.args) == 2:
            return self._sum_over_quotient(items)
        if ops.is_call(items, *_PRODUCTS):
            return self._sum_over_product(items)
        return _sum_term()

    def _sum_over_means(self, items: fx.Node) -> _Term | None:
        source = items.args[0]
        assert isinstance(source, fx.Node)
        if ops.is_view(source) and not ops.keeps_order(source):
            return None  # which dimension is the batch's?
        shape = self.program.spec(source).shape
        averaged: Any = items.args[1] or range(len(shape))
        dims = [dim % len(shape) for dim in averaged]
        return _mean_term(math.prod(shape[dim] for dim in dims)) if 0 in dims else _sum_term()

    def _sum_over_quotient(self, items: fx.Node) -> _Term | None:
        source, divisor = items.args
        inner = self._sum_over(source)  # type: ignore[arg-type]
        if inner is None or self._is_constant(divisor):
            return None if inner is None else self._divided(inner, divisor)
        spec = self.program.spec(divisor)  # type: ignore[arg-type]
        if spec.numel == 1:
            return None if spec.shape else self._divided(inner, divisor)
        return inner

    def _sum_over_product(self, items: fx.Node) -> _Term | None:
        left, right = items.args[:2]
        factor = self._constant(right)
        if factor:
            inner = self._sum_over(left)  # type: ignore[arg-type]
            return None if inner is None else self._divided(inner, 1 / factor)
        factors = [factor for factor in (left, right) if isinstance(factor, fx.Node)]
        if any(self._is_batch_scalar(factor) for factor in factors):
            return None
        terms = [self._sum_over(factor) for factor in factors if ops.is_call(factor, *_PRODUCTS, *_QUOTIENTS)]
        # weights / weights.sum() * losses: what divides one factor divides the product.
        return _sum_term() if all(term is not None and term.is_sum for term in terms) else None

    def _is_batch_scalar(self, node: fx.Node) -> bool:
        return not self.program.spec(node).shape and depends_on(self.program, node, self.batch)

    # ---- what becomes of it --------------------------------------------------------------------------------------

    def _scaled(self, node: fx.Node) -> _Term | None:
        left, right = node.args
        if ops.is_call(node, *_QUOTIENTS):
            inner = self._open_term(left)
            return None if inner is None else self._divided(inner, right)
        if self._constant(right) is None:
            left, right = right, left
        factor, inner = self._constant(right), self._open_term(left)
        return self._divided(inner, 1 / factor) if inner is not None and factor else None

    def _divided(self, term: _Term, divisor: object) -> _Term | None:
        """``term / divisor``: a constant, or a scalar that adds up over micro-batches and depends on no parameter."""
        constant = self._constant(divisor)
        if constant is not None:
            return replace(term, divisors=(*term.divisors, abs(constant))) if constant else None
        if not term.is_sum or not isinstance(divisor, fx.Node):
            return None
        count = self._count(divisor)
        if count is None:
            return None
        return _Term(LossWeight(count, f"the loss is a sum divided by {divisor.name}, which counts its items"))

    def _count(self, node: fx.Node) -> fx.Node | None:
        """The node that counts items behind divisor ``node``: a sum over batch tensors, below any lower bound."""
        while ops.is_view(node) or ops.is_call(node, aten._to_copy.default, aten.clamp.default, aten.clamp_min.default):
            if ops.is_call(node, aten.clamp.default, aten.clamp_min.default) and not _is_lower_bound(node):
                return None
            node = node.args[0]  # type: ignore[assignment]
        program = self.program
        if depends_on(program, node, self.parameters) or not depends_on(program, node, self.batch):
            return None
        if ops.is_call(node, aten.add.Tensor) and isinstance(node.args[1], float) and 0 < node.args[1] < 1e-3:
            return self._count(node.args[0])  # type: ignore[arg-type]
        term = self.term(node)
        return node if term is not None and term.is_sum else None

    def _added(self, node: fx.Node) -> _Term | None:
        left, right = node.args[:2]
        if self._is_constant(left) or self._is_constant(right):
            term = self.term(right if self._is_constant(left) else left)
            if term is None or not term.is_sum:
                return term
            return _Term(replace(term.found, reason=term.found.reason + "; a constant counts anew", is_proven=False))
        opened = self._open_term(left), self._open_term(right)
        if opened[0] is None or opened[1] is None:
            return None
        first, second = terms = self._settled(opened[0]), self._settled(opened[1])
        if first.is_sum and second.is_sum:
            return opened[0] if opened[0].divisors or not first.found.is_proven else opened[1]
        if first.found.weight == second.found.weight:
            return first if not first.found.is_proven else second
        for labels, other in (terms, terms[::-1]):
            if labels.labels is not None and _counts_labels(labels.labels, other.found.weight):
                return labels
        return None

    # ---- constants -----------------------------------------------------------------------------------------------

    def _is_constant(self, value: object) -> bool:
        return self._constant(value) is not None

    def _constant(self, value: object) -> float | None:
        """The number that ``value`` is in every micro-batch, if it is one."""
        if isinstance(value, (int, float)):
            return float(value)
        if not isinstance(value, fx.Node):
            return None
        if value.op == "get_attr" and self.program.spec(value).numel == 1:
            constant = self.program.constant(value)
            return None if constant.is_complex() else float(constant)
        if ops.is_call(value, aten.scalar_tensor.default):
            return self._constant(value.args[0])
        if ops.is_call(value, aten.full.default) and self.program.spec(value).numel == 1:
            return self._constant(value.args[1])
        if ops.is_view(value) or ops.is_call(value, aten._to_copy.default):
            return self._constant(value.args[0])
        return None


def _sum_term() -> _Term:
    return _Term(LossWeight(None, _SUM_REASON))


def _mean_term(count: int) -> _Term:
    return _Term(LossWeight(float(count), f"the loss is a mean over {count} elements"))


def _reduction(node: fx.Node) -> int | None:
    """The value of an argument called ``reduction``, if the operator has one."""
    op = ops.overload(node)
    if op is None:
        return None
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "reduction":
            return int(ops.argument(node, position, "reduction", argument.default_value))
    return None


def _is_lower_bound(node: fx.Node) -> bool:
    low, high = ops.argument(node, 1, "min"), ops.argument(node, 2, "max")
    return isinstance(low, (int, float)) and 0 <= low <= _LARGEST_LOWER_BOUND and high is None


def _counts_labels(loss_node: fx.Node, count: object) -> bool:
    """Whether ``count`` is the number of labels that ``loss_node`` does not ignore (label smoothing divides by it)."""
    _, labels, class_weights, _, ignored = loss_node.args
    if class_weights is not None or not isinstance(count, fx.Node):
        return False
    if not ops.is_call(count, aten.sum.default) or not isinstance(count.args[0], fx.Node):
        return False
    valid = count.args[0]
    if ops.is_call(valid, aten.ne.Scalar):
        return valid.args == (labels, ignored)
    if not ops.is_call(valid, aten.bitwise_not.default, aten.logical_not.default):
        return False
    equal = valid.args[0]
    return isinstance(equal, fx.Node) and ops.is_call(equal, aten.eq.Scalar) and equal.args == (labels, ignored)
