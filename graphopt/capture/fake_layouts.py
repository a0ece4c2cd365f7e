"""Fake implementations that agree with the CPU kernels about layout and dtype.

torch says that a batch normalisation's result and gradient are laid out like their input; the CPU kernels return them
contiguous, or channels-last (torch 2.13). Views behind them would be captured for a layout that never comes. And that
the statistics of a layer or group normalisation have the dtype of its input; with an input of two bytes and float32
weights they are float32.

Private torch: ``register_op_impl`` and ``op_implementations_dict`` of ``torch._subclasses.fake_impls``,
``torch._decomp.meta_table``, ``torch._refs.native_layer_norm`` (torch 2.11 to 2.14).
It can go when torch agrees with itself: ``tests/capture/test_fake_layouts.py`` says when.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._decomp import meta_table
from torch._refs import native_layer_norm
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl

aten = torch.ops.aten

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@functools.cache
def correct_fake_layouts() -> None:
    """Register the corrected implementations, once a process."""
    for operator, implementation in (
        (aten._native_batch_norm_legit_functional.default, _batch_norm),
        (aten._native_batch_norm_legit_no_training.default, _batch_norm_no_training),
        (aten.native_batch_norm_backward.default, _batch_norm_backward),
        (aten.native_group_norm.default, _group_norm),
        (aten.native_group_norm_backward.default, _group_norm_backward),
    ):
        register_op_impl(operator)(implementation)
        # An operator in this table is not decomposed before its registered implementation is asked.
        meta_table.setdefault(operator, implementation)
    op_implementations_dict[aten.native_layer_norm.default] = _layer_norm  # in the place of torch's, which it asks


def _batch_norm(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    source, _, _, running_mean, running_var, training = args[:6]
    if source.device.type != "cpu":
        return NotImplemented
    with mode:
        saved = source.new_empty((source.shape[1] if training else 0,), dtype=_statistics_dtype(source))
        return (
            _like(source),
            saved,
            saved.new_empty(saved.shape),
            torch.empty_like(running_mean),
            torch.empty_like(running_var),
        )


def _batch_norm_no_training(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    source = args[0]
    if source.device.type != "cpu":
        return NotImplemented
    with mode:
        nothing = source.new_empty((0,), dtype=_statistics_dtype(source))
        return _like(source), nothing, nothing.new_empty((0,))


def _batch_norm_backward(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    source, weight, mask = args[1], args[2], args[-1]
    if source.device.type != "cpu":
        return NotImplemented
    with mode:
        channels = source.new_empty((source.shape[1],), dtype=weight.dtype if weight is not None else source.dtype)
        return (
            _like(source) if mask[0] else None,
            channels if mask[1] else None,
            channels.new_empty(channels.shape) if mask[2] else None,
        )


def _layer_norm(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    source, normalised, weight = args[:3]
    if not _is_mixed(source, weight):
        return native_layer_norm(*args)  # as the implementation that this one replaces
    num_kept = source.dim() - len(normalised)
    with mode:
        shape = (*source.shape[:num_kept], *(1 for _ in normalised))
        statistics = source.new_empty(shape, dtype=weight.dtype)
        result = torch.empty_like(source, memory_format=torch.contiguous_format)
        return result, statistics, statistics.new_empty(shape)


def _group_norm(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    source, weight, _, num_samples, _, _, num_groups = args[:7]
    if not _is_mixed(source, weight):
        return NotImplemented
    with mode:
        statistics = source.new_empty((num_samples, num_groups), dtype=weight.dtype)
        return _like(source), statistics, statistics.new_empty(statistics.shape)


def _group_norm_backward(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    source, weight, mask = args[1], args[4], args[-1]
    if not _is_mixed(source, weight):
        return NotImplemented
    with mode:
        channels = source.new_empty((source.shape[1],), dtype=weight.dtype)
        return (
            _like(source) if mask[0] else None,
            channels if mask[1] else None,
            channels.new_empty(channels.shape) if mask[2] else None,
        )


def _is_mixed(source: torch.Tensor, weight: torch.Tensor | None) -> bool:
    return source.device.type == "cpu" and weight is not None and weight.dtype != source.dtype


def _like(source: torch.Tensor) -> torch.Tensor:
    """Empty, in the memory format that the kernels choose for ``source``."""
    channels_last = _CHANNELS_LAST.get(source.dim())
    if channels_last is not None and not source.is_contiguous() and source.is_contiguous(memory_format=channels_last):
        return torch.empty_like(source, memory_format=channels_last)
    return torch.empty_like(source, memory_format=torch.contiguous_format)


def _statistics_dtype(source: torch.Tensor) -> torch.dtype:
    return torch.float32 if source.dtype in (torch.bfloat16, torch.float16) else source.dtype
