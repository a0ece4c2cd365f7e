"""Linear + cross-entropy as operators that never hold all logits: loss, its gradient, and both at once.

``graphopt::linear_cross_entropy`` gives (loss, total weight of the rows, log-sum-exp of each row); autograd turns it
into ``graphopt::linear_cross_entropy_backward``, which computes the logits again. Where the gradient of the loss is
known beforehand, ``graphopt::linear_cross_entropy_with_gradient`` computes them once. ``chunk`` is the number of rows
whose logits are held at a time; it changes memory and rounding alone. Gradients not asked for have no element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphopt.operators.linear_loss_loops import (
    Gradients,
    Loss,
    Needs,
    gradients_by_classes,
    loss_and_gradients,
    loss_by_rows,
)
from graphopt.operators.linear_loss_math import NONE, Head, Labels, LossOptions


@torch.library.custom_op("graphopt::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    reduction: int,
    loss_dtype: torch.dtype,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss in ``loss_dtype``, total weight and log-sum-exp in the dtype of the sums. See ``linear_loss_math``."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction)
    found = loss_by_rows(Head(hidden, weight, bias), Labels(target, class_weight), options, chunk=chunk)
    return _converted(found, loss_dtype)


@torch.library.custom_op("graphopt::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    reduction: int,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, those that ``needs`` asks for."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction)
    found = gradients_by_classes(
        (grad_loss, grad_lse),
        lse,
        Head(hidden, weight, bias),
        Labels(target, class_weight),
        options,
        chunk=chunk,
        needs=Needs(*needs),
    )
    return found.hidden, found.weight, found.bias


@torch.library.custom_op("graphopt::linear_cross_entropy_with_gradient", mutates_args=())
def linear_cross_entropy_with_gradient(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    reduction: int,
    loss_dtype: torch.dtype,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What ``linear_cross_entropy`` gives, then what its backward gives for ``grad_loss``."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction)
    head, labels = Head(hidden, weight, bias), Labels(target, class_weight)
    loss, found = loss_and_gradients(grad_loss, head, labels, options, chunk=chunk, needs=Needs(*needs))
    return (*_converted(loss, loss_dtype), found.hidden, found.weight, found.bias)


def _converted(found: Loss, loss_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return found.loss.to(loss_dtype), found.total, found.lse


@linear_cross_entropy.register_fake
def _loss_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _loss_like(Head(*arguments[:3]), reduction=arguments[10], loss_dtype=arguments[11])


@linear_cross_entropy_backward.register_fake
def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    found = Gradients.empty(Head(*arguments[3:6]), Needs(*arguments[15]))
    return found.hidden, found.weight, found.bias


@linear_cross_entropy_with_gradient.register_fake
def _with_gradient_fake(*arguments: Any) -> tuple[Tensor, ...]:
    head = Head(*arguments[1:4])
    found = Gradients.empty(head, Needs(*arguments[14]))
    loss = _loss_like(head, reduction=arguments[11], loss_dtype=arguments[12])
    return (*loss, found.hidden, found.weight, found.bias)


def _loss_like(head: Head, *, reduction: int, loss_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, dtype = head.hidden, head.dtype
    num_rows = hidden.shape[0]
    loss = hidden.new_empty((num_rows,) if reduction == NONE else (), dtype=loss_dtype)
    return loss, hidden.new_empty((), dtype=dtype), hidden.new_empty((num_rows,), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, class_weight, *options, _, chunk = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], hidden, weight, bias, target, class_weight)
    ctx.options = (*options, chunk)


def _backward(ctx: Any, grad_loss: Tensor | None, _: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    lse, hidden, weight, bias, target, class_weight = ctx.saved_tensors
    if grad_loss is None and grad_lse is None:
        return (None,) * 13
    if grad_loss is None:
        reduction = ctx.options[5]
        grad_loss = lse.new_zeros(lse.shape if reduction == NONE else ())
    needs = list(ctx.needs_input_grad[:3])
    found = linear_cross_entropy_backward(
        grad_loss, grad_lse, lse, hidden, weight, bias, target, class_weight, *ctx.options, needs
    )
    gradients = (gradient if need else None for gradient, need in zip(found, needs, strict=True))
    return (*gradients, *((None,) * 10))


linear_cross_entropy.register_autograd(_backward, setup_context=_save)
