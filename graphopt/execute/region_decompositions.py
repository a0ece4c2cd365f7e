"""What Inductor takes operators apart into, where torch's own way disagrees with the operator about a dtype.

On a CPU the statistics of a normalisation of two bytes are float32: of a batch normalisation always, of a layer or
group normalisation if its weights are. torch's decompositions round them to two bytes.

Private torch: ``torch._inductor.decomposition.select_decomp_table`` (torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table

from graphopt.execute.fp8_decompositions import FP8_DECOMPOSITIONS

aten = torch.ops.aten

_Decomposition = Callable[..., tuple[Tensor, ...]]

_WEIGHT = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}
"""Where the weight stands among the arguments."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table, with normalisations whose statistics are those of the operators, and with FP8 casts."""
    table = {**select_decomp_table(), **FP8_DECOMPOSITIONS}
    for operator, position in _WEIGHT.items():
        table[operator] = _in_float32(table[operator], lambda *args, at=position: _is_float32(args[at]))
    batch_norm = aten._native_batch_norm_legit_functional.default
    table[batch_norm] = _in_float32(table[batch_norm], lambda *args: True)
    return table


def _in_float32(decomposition: _Decomposition, keeps_float32: Callable[..., bool]) -> _Decomposition:
    """``decomposition`` of a source in float32 with its result rounded once, where the operator computes like that."""

    def decomposed(source: Tensor, *others: Any) -> tuple[Tensor, ...]:
        is_narrow = source.dtype in (torch.bfloat16, torch.float16)
        if source.device.type != "cpu" or not is_narrow or not keeps_float32(source, *others):
            return decomposition(source, *others)
        result, *statistics = decomposition(source.to(torch.float32), *others)
        return (result.to(source.dtype), *statistics)

    return decomposed


def _is_float32(weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype is torch.float32
