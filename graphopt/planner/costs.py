"""What a call costs in seconds: matrix work by its FLOPs over a rate, everything else by its bytes over a bandwidth.

The rates are those of the default machine, the same in every process, unless ``graphopt calibrate`` has measured this
one; only their ratio decides what is worth computing again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from graphopt.ir import ops
from graphopt.ir.fp8_codes import finds_scales, matrix_grids
from graphopt.ir.program import Program
from graphopt.ir.storage import tensors_in
from graphopt.operators import fp8

aten = torch.ops.aten


@dataclass(frozen=True)
class Rates:
    """Speed of a machine: FLOPs a second of matrix products, bytes a second read and written by other operators, bytes
    a second to and from host memory, and seconds that any call takes at least."""

    flops: float
    bytes: float
    host_bytes: float
    call_seconds: float
    name: str = "default"


# Of the order of two CPU cores in fp32, where a product of 2,048 x 512 x 1,376 ran at 54 to 60 GFLOP/s, and where fresh
# memory is much slower than a cache. Only the ratios matter; `graphopt calibrate` measures a machine's own.
DEFAULT_RATES = Rates(flops=60e9, bytes=6e9, host_bytes=5e9, call_seconds=3e-6)


def call_seconds(program: Program, rates: Rates = DEFAULT_RATES) -> dict[fx.Node, float]:
    """The cost of every call of ``program`` by node."""
    return {node: node_seconds(node, rates) for node in program.ops()}


def node_seconds(node: fx.Node, rates: Rates) -> float:
    """Seconds that ``node`` takes."""
    if ops.is_getitem(node) or ops.is_scalar_op(node):
        return 0.0
    if ops.is_view(node):
        return rates.call_seconds
    moved = moved_bytes(node) / rates.bytes
    return rates.call_seconds + max(moved, node_flops(node) / rates.flops)


def moved_bytes(node: fx.Node) -> int:
    """Bytes of all tensors that ``node`` reads and writes."""
    read = sum(_nbytes(tensor) for argument in node.all_input_nodes for tensor in tensors_in(argument.meta.get("val")))
    if _looks_first(node):
        read += _nbytes(node.all_input_nodes[0].meta["val"])
    return read + sum(_nbytes(tensor) for tensor in tensors_in(node.meta.get("val")))


def _looks_first(node: fx.Node) -> bool:
    """Whether ``node`` reads all of its argument for a scale before it reads it again for FP8 codes."""
    return finds_scales(node) and any(rows == 0 for rows, _ in matrix_grids(node))


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of matrix products, convolutions and attention; 0 for all else."""
    op = ops.overload(node)
    if op is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    own = _OWN.get(op)
    if own is not None:
        return own(*args, **kwargs)
    formula = flop_registry.get(op.overloadpacket)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that are really read: an expanded dimension is read once."""
    return (
        math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        * tensor.dtype.itemsize
    )


def _attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Two products of [queries x keys]; torch's registry has none for CPU attention (2.13). A causal one does them all:
    the CPU kernel skips blocks only beyond the diagonal, which its speed at 512 positions does not show."""
    batch_heads = math.prod(query.shape[:-2])
    return 2 * batch_heads * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Five products where the forward has two."""
    return _attention(query, key, value) * 5 // 2


_OWN: dict[Any, Callable[..., int]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.linear.default: lambda x, weight, bias=None: 2 * x.numel() * weight.shape[0],
    fp8.MATMUL: lambda a, a_scale, a_block, b, *rest: 2 * a.numel() * b.shape[1],
}
