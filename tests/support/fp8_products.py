"""FP8 products to compute, and how far a result is from what it must be."""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.kernels.fp8_format import Grid
from graphopt.kernels.fp8_product import Operand, Product
from graphopt.operators import fp8

# Grids of a and of b as they lie, by what uses them.
GRIDS: dict[str, tuple[Grid, Grid]] = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (0, 1)),
    "blockwise": ((1, 128), (128, 128)),
    "blockwise weight gradient": ((1, 128), (128, 1)),
}
FORMATS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
# What an implementation must keep of the exact product of the codes, and the codes of the product of the values.
KERNEL_DECIBELS, VALUE_DECIBELS = 60.0, 25.0


def quantized(x: Tensor, grid: Grid, format: str = "e4m3") -> Operand:
    return Operand(*fp8.quantize(x, format, grid, False), grid)


def product_of(
    a: Tensor,
    b: Tensor,
    grids: tuple[Grid, Grid] = GRIDS["tensorwise"],
    formats: tuple[str, str] = FORMATS[0],
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Product:
    """Of a [M,K] and b [K,N], both with the contraction contiguous."""
    a_grid, (b_rows, b_columns) = grids
    return Product(
        quantized(a, a_grid, formats[0]),
        quantized(b.t(), (b_columns, b_rows), formats[1]).transpose,
        bias,
        dtype,
    )


def random_product(m: int, n: int, k: int, *arguments, seed: int = 0, **options) -> Product:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return product_of(a, b, *arguments, **options)


def decibels(expected: Tensor, found: Tensor) -> float:
    """The ratio of ``expected`` to what ``found`` differs by; inf where they are equal."""
    return (20 * torch.log10(expected.double().norm() / (expected.double() - found.double()).norm())).item()
