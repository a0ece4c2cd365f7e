"""Linear + cross-entropy piece by piece: the loss, its gradients, and both at once.

A piece is ``chunk`` rows of all V classes or, where log-sum-exps are known already, as many logits of all N rows and a
part of the classes: then each row of the weight's gradient is written once, in full precision, and converted once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.operators import linear_loss_math as math
from graphopt.operators.linear_loss_math import Head, Labels, LossOptions, RowFacts, RowGradient


@dataclass(frozen=True)
class Loss:
    """loss: [] or [N]; total: [], the weight of all rows; lse: [N]; all in the dtype of the sums."""

    loss: Tensor
    total: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for; the others come as tensors of no element."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Gradients:
    """Gradients of the head in its own dtypes and layouts; of no element where not asked for."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def empty(cls, head: Head, needs: Needs) -> Gradients:
        """Gradients with no content yet."""
        nothing = head.hidden.new_empty(0)
        return cls(
            head.hidden.new_empty(head.hidden.shape) if needs.hidden else nothing,
            torch.empty_like(head.weight) if needs.weight else head.hidden.new_empty(0),
            torch.empty_like(head.bias) if needs.bias and head.bias is not None else head.hidden.new_empty(0),
        )


def loss_by_rows(head: Head, labels: Labels, options: LossOptions, *, chunk: int) -> Loss:
    """The Loss; holds ``chunk`` rows of logits."""
    num_rows, num_classes = head.hidden.shape[0], head.weight.shape[0]
    facts = math.row_facts(labels, options, head.dtype)
    lse, losses = (torch.empty(num_rows, dtype=head.dtype, device=head.hidden.device) for _ in range(2))
    buffer = torch.empty(min(chunk, num_rows), num_classes, dtype=head.dtype, device=head.hidden.device)
    for start, end in math.pieces(num_rows, chunk):
        logits = buffer[: end - start]
        _fill_logits(logits, head, options, start, end)
        losses[start:end], _ = _losses(logits, lse[start:end], facts.of_rows(start, end), labels, options)
    return Loss(math.reduced(losses, lse, facts, options), facts.total, lse)


def gradients_by_classes(
    grads: tuple[Tensor, Tensor | None],
    lse: Tensor,
    head: Head,
    labels: Labels,
    options: LossOptions,
    *,
    chunk: int,
    needs: Needs,
) -> Gradients:
    """The Gradients for ``grads``, those of the loss and of ``lse``; holds as many logits as ``chunk`` rows have."""
    num_rows, num_classes = head.hidden.shape[0], head.weight.shape[0]
    facts = math.row_facts(labels, options, head.dtype)
    rows = math.row_gradient(grads[0], lse, facts, labels, num_classes, options)
    if grads[1] is not None:
        rows = RowGradient(rows.pull + grads[1].unsqueeze(1), rows.push, rows.spread)
    found = Gradients.empty(head, needs)
    hidden = head.hidden.to(head.dtype)
    hidden_gradient = None
    if needs.hidden:
        is_same = found.hidden.dtype == head.dtype
        hidden_gradient = found.hidden if is_same else torch.empty_like(found.hidden, dtype=head.dtype)
        hidden_gradient.zero_()
    size = max(1, min(num_classes, chunk * num_classes // max(num_rows, 1)))
    buffer = torch.empty(num_rows * size, dtype=head.dtype, device=head.hidden.device)
    for start, end in math.pieces(num_classes, size):
        logits = buffer[: num_rows * (end - start)].view(num_rows, end - start)
        weight = head.weight[start:end].to(head.dtype)
        torch.mm(hidden, weight.t(), out=logits)
        if head.bias is not None:
            logits.add_(head.bias[start:end])
        math.shape_logits(logits, options)
        kept = logits.clone() if options.softcap else None
        logits.sub_(lse.unsqueeze(1)).exp_().mul_(rows.pull)
        class_weight = None if labels.class_weight is None else labels.class_weight[start:end]
        _finish_gradient(logits, kept, rows, facts.target - start, class_weight, options)
        _store_class_gradients(found, logits, hidden, start, end, needs)
        if hidden_gradient is not None:
            hidden_gradient.addmm_(logits, weight)
        del weight, kept
    if hidden_gradient is not None and hidden_gradient is not found.hidden:
        found.hidden.copy_(hidden_gradient)
    return found


def loss_and_gradients(
    grad_loss: Tensor, head: Head, labels: Labels, options: LossOptions, *, chunk: int, needs: Needs
) -> tuple[Loss, Gradients]:
    """Loss and Gradients from one computation of the logits; holds ``chunk`` rows of them (twice with soft-capping).

    For a weight in lower precision it also holds the weight's gradient in float32.
    """
    num_rows, num_classes = head.hidden.shape[0], head.weight.shape[0]
    facts = math.row_facts(labels, options, head.dtype)
    lse, losses = (torch.empty(num_rows, dtype=head.dtype, device=head.hidden.device) for _ in range(2))
    found = Gradients.empty(head, needs)
    weight, bias = (_accumulator(value, head.dtype) for value in (found.weight, found.bias))
    buffer = torch.empty(min(chunk, num_rows), num_classes, dtype=head.dtype, device=head.hidden.device)
    for start, end in math.pieces(num_rows, chunk):
        logits, part, row_lse = buffer[: end - start], facts.of_rows(start, end), lse[start:end]
        _fill_logits(logits, head, options, start, end)
        kept = logits.clone() if options.softcap else None
        losses[start:end], denominators = _losses(logits, row_lse, part, labels, options)
        row_grad = grad_loss[start:end] if grad_loss.dim() else grad_loss
        rows = math.row_gradient(row_grad, row_lse, part, labels, num_classes, options)
        logits.mul_(rows.pull / denominators)
        _finish_gradient(logits, kept, rows, part.target, labels.class_weight, options)
        del kept
        _add_row_gradients(found, weight, bias, logits, head, start, end)
    if weight is not found.weight:
        found.weight.copy_(weight)
    if bias is not found.bias:
        found.bias.copy_(bias)
    return Loss(math.reduced(losses, lse, facts, options), facts.total, lse), found


def _fill_logits(logits: Tensor, head: Head, options: LossOptions, start: int, end: int) -> None:
    math.project(logits, head.hidden[start:end], head)
    math.shape_logits(logits, options)


def _losses(
    logits: Tensor, lse_out: Tensor, facts: RowFacts, labels: Labels, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Losses [R] and softmax denominators [R,1]; fills ``lse_out``; leaves ``exp(z - max)`` in ``logits``."""
    picked = logits.gather(1, facts.target.unsqueeze(1)).squeeze(1)
    weighted = math.weighted_logits(logits, labels, options)
    top = logits.amax(1, keepdim=True)
    denominators = logits.sub_(top).exp_().sum(1, keepdim=True)
    torch.add(denominators.log().squeeze(1), top.squeeze(1), out=lse_out)
    losses = math.row_losses(lse_out, picked, weighted, facts, labels, logits.shape[1], options)
    return losses, denominators


def _finish_gradient(
    pulled: Tensor,
    logits: Tensor | None,
    rows: RowGradient,
    column: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
) -> None:
    """Turn ``pull * softmax`` of a piece into the gradient of its logits before scale and cap, in place.

    ``column``: i64[R], where each row's target lies in this piece; outside of it where it is in another.
    """
    width = pulled.shape[1]
    is_here = (column >= 0).logical_and_(column < width).unsqueeze(1)
    push = torch.where(is_here, -rows.push, 0.0)
    pulled.scatter_add_(1, column.clamp(0, width - 1).unsqueeze(1), push)
    math.spread_smoothing(pulled, rows.spread, class_weight)
    math.unshape_gradient(pulled, logits, options)


def _store_class_gradients(
    found: Gradients, gradient: Tensor, hidden: Tensor, start: int, end: int, needs: Needs
) -> None:
    if needs.bias:
        found.bias[start:end] = gradient.sum(0)
    if not needs.weight:
        return
    if found.weight.dtype == gradient.dtype:
        torch.mm(gradient.t(), hidden, out=found.weight[start:end])
    else:
        found.weight[start:end] = torch.mm(gradient.t(), hidden)


def _accumulator(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` itself, or a tensor of its layout in ``dtype``, filled with zeros."""
    return (value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)).zero_()


def _add_row_gradients(
    found: Gradients, weight: Tensor, bias: Tensor, gradient: Tensor, head: Head, start: int, end: int
) -> None:
    """Write the hidden rows' gradient; add to those of ``weight`` and ``bias``. Empty tensors are left alone."""
    hidden = head.hidden[start:end].to(gradient.dtype)
    if bias.numel():
        bias.add_(gradient.sum(0))
    if weight.numel():
        weight.addmm_(gradient.t(), hidden)
    if found.hidden.numel():
        if head.weight.dtype != gradient.dtype:
            found.hidden[start:end] = _through_weight(gradient, head)
        elif found.hidden.dtype != gradient.dtype:
            found.hidden[start:end] = torch.mm(gradient, head.weight)
        else:
            torch.mm(gradient, head.weight, out=found.hidden[start:end])


def _through_weight(gradient: Tensor, head: Head) -> Tensor:
    """``gradient W`` for a weight of lower precision, converted block by block: [R,D]."""
    num_classes, num_features = head.weight.shape
    total = gradient.new_zeros(gradient.shape[0], num_features)
    for start, end in math.pieces(num_classes, math.cast_block(num_features)):
        total.addmm_(gradient[:, start:end], head.weight[start:end].to(gradient.dtype))
    return total
