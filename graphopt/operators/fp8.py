"""Quantizing to FP8, back, and the product of two quantized matrices, as operators.

``quantize_fp8(x, format, block, power_of_two) -> (codes, scale)``; ``quantize_fp8_transposed`` gives the codes of the
transpose, contiguous; ``quantize_fp8_both`` both from one reading. ``quantize_fp8_delayed(x, scale, format) -> (codes,
amax)`` uses a scale that is given. ``dequantize_fp8(codes, scale, block, dtype)`` undoes it.
``fp8_matmul(a, a_scale, a_block, b, b_scale, b_block, bias, dtype)`` is ``(a * a_scale) @ (b * b_scale) + bias`` for
a [M,K] and b [K,N], summed in float32 and rounded once.

``block``, scales, formats: see ``graphopt.kernels.fp8_format``. All matrices are 2-D, results contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.kernels import fp8_cast, fp8_matmul
from graphopt.kernels.fp8_format import Grid, format_named, grid_shape
from graphopt.kernels.fp8_product import Operand, Product

LIBRARY = torch.library.Library("graphopt", "FRAGMENT")

_SCHEMAS = {
    "quantize_fp8": "(Tensor x, str format, int[2] block, bool power_of_two) -> (Tensor, Tensor)",
    "quantize_fp8_transposed": "(Tensor x, str format, int[2] block, bool power_of_two) -> (Tensor, Tensor)",
    "quantize_fp8_both": (
        "(Tensor x, str format, int[2] block, int[2] block_t, bool power_of_two) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "quantize_fp8_delayed": "(Tensor x, Tensor scale, str format) -> (Tensor, Tensor)",
    "quantize_fp8_delayed_both": "(Tensor x, Tensor scale, str format) -> (Tensor, Tensor, Tensor)",
    "dequantize_fp8": "(Tensor codes, Tensor scale, int[2] block, ScalarType dtype) -> Tensor",
    "fp8_matmul": (
        "(Tensor a, Tensor a_scale, int[2] a_block, Tensor b, Tensor b_scale, int[2] b_block, Tensor? bias, "
        "ScalarType dtype) -> Tensor"
    ),
}
for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)

_NAMESPACE = torch.ops.graphopt
QUANTIZE = _NAMESPACE.quantize_fp8.default
QUANTIZE_TRANSPOSED = _NAMESPACE.quantize_fp8_transposed.default
QUANTIZE_BOTH = _NAMESPACE.quantize_fp8_both.default
QUANTIZE_DELAYED = _NAMESPACE.quantize_fp8_delayed.default
QUANTIZE_DELAYED_BOTH = _NAMESPACE.quantize_fp8_delayed_both.default
DEQUANTIZE = _NAMESPACE.dequantize_fp8.default
MATMUL = _NAMESPACE.fp8_matmul.default

_ONE_SCALE: Grid = (0, 0)


def quantize(x: Tensor, format: str, block: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """The codes of x [M,K] and their scales."""
    return fp8_cast.quantize(x, format, _grid(block), power_of_two=power_of_two)


def quantize_transposed(x: Tensor, format: str, block: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """The codes [K,M] of the transpose of x, contiguous, and their scales; ``block`` is that of the transpose."""
    return fp8_cast.quantize(x.t(), format, _grid(block), power_of_two=power_of_two)


def quantize_both(
    x: Tensor, format: str, block: Sequence[int], block_t: Sequence[int], power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``quantize`` gives with ``block``, then what ``quantize_transposed`` gives with ``block_t``."""
    return fp8_cast.quantize_both(x, format, _grid(block), _grid(block_t), power_of_two=power_of_two)


def quantize_delayed(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The codes of x [M,K] at ``scale`` f32[1,1], saturating, and the largest absolute value of x, f32[]."""
    return fp8_cast.quantize_delayed(x, scale, format)


def quantize_delayed_both(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """As ``quantize_delayed``, with the codes of the transpose, contiguous, between the two."""
    return fp8_cast.quantize_delayed_both(x, scale, format)


def dequantize(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``codes * scale`` [M,K] in ``dtype``, contiguous."""
    return fp8_cast.dequantize(codes, scale, _grid(block), dtype)


def matmul(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``(a * a_scale) @ (b * b_scale) + bias`` [M,N]; see ``graphopt.kernels.fp8_product``."""
    operands = Operand(a, a_scale, _grid(a_block)), Operand(b, b_scale, _grid(b_block))
    return fp8_matmul.matmul(Product(*operands, bias, dtype))


def _grid(block: Sequence[int]) -> Grid:
    rows, columns = block
    return rows, columns


def _quantized_fake(x: Tensor, format: str, block: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(tuple(x.shape), dtype=format_named(format).dtype, device=x.device)
    return codes, torch.empty(grid_shape(x.shape, _grid(block)), dtype=torch.float32, device=x.device)


def _transposed_fake(x: Tensor, format: str, block: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    return _quantized_fake(x.t(), format, block, power_of_two)


def _both_fake(
    x: Tensor, format: str, block: Sequence[int], block_t: Sequence[int], power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_quantized_fake(x, format, block, power_of_two), *_transposed_fake(x, format, block_t, power_of_two))


def _delayed_fake(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return _quantized_fake(x, format, _ONE_SCALE, False)[0], torch.empty((), device=x.device)


def _delayed_both_fake(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    codes, amax = _delayed_fake(x, scale, format)
    return codes, _quantized_fake(x.t(), format, _ONE_SCALE, False)[0], amax


def _dequantized_fake(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(codes.shape), dtype=dtype, device=codes.device)


def _matmul_fake(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)


for _name, _run, _fake in (
    ("quantize_fp8", quantize, _quantized_fake),
    ("quantize_fp8_transposed", quantize_transposed, _transposed_fake),
    ("quantize_fp8_both", quantize_both, _both_fake),
    ("quantize_fp8_delayed", quantize_delayed, _delayed_fake),
    ("quantize_fp8_delayed_both", quantize_delayed_both, _delayed_both_fake),
    ("dequantize_fp8", dequantize, _dequantized_fake),
    ("fp8_matmul", matmul, _matmul_fake),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt::{_name}", _fake, lib=LIBRARY)
