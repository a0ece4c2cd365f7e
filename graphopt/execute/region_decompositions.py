"""What Inductor takes operators apart into, where torch's own way disagrees with the operator about a dtype.

The statistics of a layer or group normalisation of two bytes with float32 weights are float32 on a CPU. torch's
decompositions round them to two bytes: whoever reads them as planned would read other numbers.
It can go when they agree: ``tests/execute/test_inductor.py`` says when.

Private torch: ``torch._inductor.decomposition.select_decomp_table``, ``torch._refs`` (torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._refs import native_group_norm, native_layer_norm

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table with what is corrected here."""
    return {
        **select_decomp_table(),
        aten.native_layer_norm.default: _layer_norm,
        aten.native_group_norm.default: _group_norm,
    }


def _layer_norm(
    source: Tensor, normalised: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_mixed(source, weight):
        return native_layer_norm(source, normalised, weight, bias, eps)  # type: ignore[no-any-return]
    result, mean, rstd = native_layer_norm(source.to(torch.float32), normalised, weight, bias, eps)
    return result.to(source.dtype), mean, rstd


def _group_norm(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes_and_eps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_mixed(source, weight):
        return native_group_norm(source, weight, bias, *sizes_and_eps)  # type: ignore[no-any-return]
    result, mean, rstd = native_group_norm(source.to(torch.float32), weight, bias, *sizes_and_eps)
    return result.to(source.dtype), mean, rstd


def _is_mixed(source: Tensor, weight: Tensor | None) -> bool:
    return source.device.type == "cpu" and weight is not None and weight.dtype != source.dtype
