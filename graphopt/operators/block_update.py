"""Updates of block-INT8 optimizers as operators: Adam and Lion, functional, in place, and in place for a whole list.

``graphopt::block_adam`` gives new tensors, ``block_adam_`` writes into its own, ``block_adam_list_`` does so for a list
of parameters in one launch; ``block_lion`` likewise. The formulas, and what each argument means, stand in
``graphopt.kernels.block_adam``, ``block_lion`` and ``block_update``. ``step`` counts from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphopt.kernels import block_adam as adam_kernel
from graphopt.kernels import block_lion as lion_kernel
from graphopt.kernels.block_update import BlockItem, BlockOptions, Moment

_ADAM_STATE = ("parameter", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
_ADAM_STATES = ("parameters", "exp_avgs", "exp_avg_scales", "exp_avg_sqs", "exp_avg_sq_scales")
_LION_STATE = ("parameter", "exp_avg", "exp_avg_scale")
_LION_STATES = ("parameters", "exp_avgs", "exp_avg_scales")


@torch.library.custom_op("graphopt::block_adam_list_", mutates_args=_ADAM_STATES)
def block_adam_list_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_state: bool,
    stochastic_weight: bool,
    seeds: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """One launch for all parameters, in place; the lists have one length."""
    moments = zip(_moments(exp_avgs, exp_avg_scales), _moments(exp_avg_sqs, exp_avg_sq_scales), strict=True)
    scalars = adam_kernel.AdamScalars.of(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2, eps=eps, step=step)
    options = BlockOptions(block, map, decoupled, stochastic_state, stochastic_weight)
    items = _items(parameters, gradients, moments, seeds, offsets)
    adam_kernel.update_(items, scalars, options, factor=factor, step=step)


@torch.library.custom_op("graphopt::block_adam_", mutates_args=_ADAM_STATE)
def block_adam_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_state: bool,
    stochastic_weight: bool,
    seed: int,
    offset: int,
) -> None:
    """One parameter, in place, without memory of its own (but for a gradient of another layout)."""
    moments = (Moment(exp_avg, exp_avg_scale), Moment(exp_avg_sq, exp_avg_sq_scale))
    scalars = adam_kernel.AdamScalars.of(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2, eps=eps, step=step)
    options = BlockOptions(block, map, decoupled, stochastic_state, stochastic_weight)
    item = BlockItem(parameter, gradient, moments, seed, offset)
    adam_kernel.update_((item,), scalars, options, factor=factor, step=step)


@torch.library.custom_op("graphopt::block_adam", mutates_args=())
def block_adam(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_state: bool,
    stochastic_weight: bool,
    seed: int,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """New parameter, exp_avg, its scales, exp_avg_sq, its scales."""
    new = [tensor.clone() for tensor in (parameter, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)]
    scalars = adam_kernel.AdamScalars.of(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2, eps=eps, step=step)
    options = BlockOptions(block, map, decoupled, stochastic_state, stochastic_weight)
    item = BlockItem(new[0], gradient, (Moment(*new[1:3]), Moment(*new[3:5])), seed, offset)
    adam_kernel.update_((item,), scalars, options, factor=factor, step=step)
    return new[0], new[1], new[2], new[3], new[4]


@torch.library.custom_op("graphopt::block_lion_list_", mutates_args=_LION_STATES)
def block_lion_list_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_weight: bool,
    seeds: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """One launch for all parameters, in place; the lists have one length."""
    moments = ((moment,) for moment in _moments(exp_avgs, exp_avg_scales))
    scalars = lion_kernel.LionScalars.of(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2)
    options = BlockOptions(block, map, decoupled, stochastic_weight=stochastic_weight)
    items = _items(parameters, gradients, moments, seeds, offsets)
    lion_kernel.update_(items, scalars, options, factor=factor, step=step)


@torch.library.custom_op("graphopt::block_lion_", mutates_args=_LION_STATE)
def block_lion_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_weight: bool,
    seed: int,
    offset: int,
) -> None:
    """One parameter, in place, without memory of its own (but for a gradient of another layout)."""
    scalars = lion_kernel.LionScalars.of(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2)
    options = BlockOptions(block, map, decoupled, stochastic_weight=stochastic_weight)
    item = BlockItem(parameter, gradient, (Moment(exp_avg, exp_avg_scale),), seed, offset)
    lion_kernel.update_((item,), scalars, options, factor=factor, step=step)


@torch.library.custom_op("graphopt::block_lion", mutates_args=())
def block_lion(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_weight: bool,
    seed: int,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """New parameter, exp_avg, its scales."""
    new = [tensor.clone() for tensor in (parameter, exp_avg, exp_avg_scale)]
    scalars = lion_kernel.LionScalars.of(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2)
    options = BlockOptions(block, map, decoupled, stochastic_weight=stochastic_weight)
    item = BlockItem(new[0], gradient, (Moment(new[1], new[2]),), seed, offset)
    lion_kernel.update_((item,), scalars, options, factor=factor, step=step)
    return new[0], new[1], new[2]


def _moments(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Moment]:
    return [Moment(*pair) for pair in zip(codes, scales, strict=True)]


def _items(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Iterable[tuple[Moment, ...]],
    seeds: Sequence[int],
    offsets: Sequence[int],
) -> list[BlockItem]:
    rows = zip(parameters, gradients, moments, seeds, offsets, strict=True)
    return [BlockItem(*row) for row in rows]


@block_adam.register_fake
def _adam_fake(*arguments: Any) -> tuple[Tensor, ...]:
    parameter, _, *state = arguments[:6]
    return tuple(torch.empty_like(tensor) for tensor in (parameter, *state))


@block_lion.register_fake
def _lion_fake(*arguments: Any) -> tuple[Tensor, ...]:
    parameter, _, *state = arguments[:4]
    return tuple(torch.empty_like(tensor) for tensor in (parameter, *state))


def _nothing(*_: Any) -> None:
    """An update in place makes no tensor."""


for _operator in (block_adam_, block_adam_list_, block_lion_, block_lion_list_):
    _operator.register_fake(_nothing)
