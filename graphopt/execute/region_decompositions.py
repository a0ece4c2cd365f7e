"""How Inductor takes operators apart inside a region, where its own way gives other dtypes than the kernels of the plan.

Torch's decomposition of a layer normalisation rounds the statistics to the dtype of the input on a CPU; with an input of
two bytes and float32 weights the kernel returns float32, and so does this one.

Private torch: ``torch._inductor.decomposition.select_decomp_table`` (torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table

aten = torch.ops.aten


def region_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions of a region, by operator."""
    table = dict(select_decomp_table())
    table[aten.native_layer_norm.default] = _layer_norm_of(table[aten.native_layer_norm.default])
    return table


def _layer_norm_of(torch_decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def layer_norm(
        source: torch.Tensor,
        normalised: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> Any:
        if weight is None or weight.dtype == source.dtype:
            return torch_decomposition(source, normalised, weight, bias, eps)
        dims = list(range(source.dim() - len(normalised), source.dim()))
        wide = source.to(weight.dtype)
        variance, mean = torch.var_mean(wide, dim=dims, unbiased=False, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        result = (wide - mean) * scale * weight
        if bias is not None:
            result = result + bias
        return result.to(source.dtype), mean, scale

    return layer_norm
