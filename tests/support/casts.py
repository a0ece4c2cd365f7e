"""Matrices to cast to FP8, the casts of the reference, and how two results are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.kernels.fp8_format import Grid, encode, format_named, grid_shape, group_amax, scale_of

Result = tuple[Tensor, Tensor]


def reference(x: Tensor, format: str, grid: Grid, *, power_of_two: bool = False) -> Result:
    """Codes and scales of x by the functions of ``fp8_format``, on all of x at once."""
    kind = format_named(format)
    scale = scale_of(group_amax(x, grid), kind, power_of_two=power_of_two)
    return encode(x, scale, grid, kind).contiguous(), scale


def matrix(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of sizes that lie far apart; ends of its range and zeros among them where there is room."""
    x = torch.randn(num_rows, num_columns) * (torch.randn(num_rows, 1) * 4).exp()
    edges = (0.0, -0.0, 1e-45, -1e-38, 3e-39, 1e38, float("inf"), -float("inf"), float("nan"), -float("nan"))
    if num_rows > 2 * len(edges):
        x[3] = 0.0
        for place, value in enumerate(edges):
            x[2 * place + 4, place * num_columns // len(edges)] = value
        x[-1] = 1e-45
        x[-2] = 1e-38
    return x.to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x with "rows" or "columns" contiguous, or "neither"."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "neither":
        wide = x.new_zeros(2 * x.shape[0], 3 * x.shape[1])[::2, ::3]
        wide.copy_(x)
        return wide
    return x.contiguous()


def num_different(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """How many numbers differ in their bits, any NaN of float32, bfloat16 and float16 counting as one."""
    return sum(_different(one, other) for one, other in zip(found, expected, strict=True))


def _different(found: Tensor, expected: Tensor) -> int:
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    different = found.view(integer) != expected.contiguous().view(integer)
    if found.element_size() > 1:
        different &= ~(found.isnan() & expected.isnan())
    return int(different.sum())


def cast_bytes(shape: torch.Size | tuple[int, int], element_bytes: int, grids: Sequence[Grid]) -> int:
    """The bytes that a cast of x [M,K] cannot but move, for ``grids`` of codes, one or two, in x's orientation.

    x is read once, or twice where all rows share a scale: no code can be written before the last row was seen.
    """
    num_elements = shape[0] * shape[1]
    readings = 2 if any(grid[0] == 0 for grid in grids) else 1
    scales = sum(4 * math.prod(grid_shape(shape, grid)) for grid in grids)
    return num_elements * (readings * element_bytes + len(grids)) + scales
