"""Arguments to find out what an update of paged state allocates: few ranges of a parameter stand for many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphopt.capture.range_update import rule_named
from graphopt.execute.paging.engine import NUM_STAGING
from graphopt.ir import ops


def trial_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Zeros to call ``node`` with, which then allocates what it will; None for what is no update of paged state.

    The state of a parameter may be larger than memory. All but the first ranges and the last one take what the first
    ones took, so those in the middle are left out, where parameter and gradient are one run each.
    """
    if not ops.is_paged_update(node):
        return None
    parameter, gradient, _, factor, numbers, name, seed, staging, *first = (_value(item) for item in node.args)
    rule = rule_named(name)
    numel = parameter.numel()
    few = NUM_STAGING * rule.range_elements + numel % rule.range_elements
    if few < numel and parameter.stride() == gradient.stride():
        numel = few
        parameter, gradient = (torch.empty(few, dtype=value.dtype, device="meta") for value in (parameter, gradient))
    state = torch.zeros(rule.layout(numel).nbytes, dtype=torch.uint8)
    scalar = None if factor is None else torch.ones((), dtype=factor.dtype)
    buffers = [torch.zeros(staging, dtype=torch.uint8) for buffer in first if buffer is not None]
    return (_zeros(parameter), _zeros(gradient), state, scalar, numbers, name, seed, staging, *buffers), {}


def _value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    return [_value(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _zeros(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
