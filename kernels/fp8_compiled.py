"""FP8 casts by the compiled CPU kernels (``cpu_source/fp8_calls.h``): the bits of ``fp8_format``, no workspace.

Each function says False where it does not apply: no compiler, or a matrix whose rows are not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.kernels import cpu_calls, cpu_library
from graphopt.kernels.cpu_calls import Fp8Groups
from graphopt.kernels.fp8_format import Cast, Grid, format_of, scale_of

_ONE_SCALE: Grid = (0, 0)


def fill(x: Tensor, casts: Sequence[Cast], *, power_of_two: bool) -> bool:
    """Fills one or two ``casts`` of x [M,K], not empty; each in the orientation of x."""
    if not _applies_to(x):
        return False
    for cast in casts:
        amax = _largest(x, cast.grid, cast.scale.shape)
        cast.scale.copy_(scale_of(amax, format_of(cast.codes), power_of_two=power_of_two))
        cpu_calls.fp8_encode(x, _groups(x, cast.grid), (1.0 / cast.scale).contiguous(), cast.codes)
    return True


def fill_at_given_scale(x: Tensor, casts: Sequence[Cast], amax: Tensor) -> bool:
    """Fills the codes of ``casts`` of x [M,K], not empty, at their one scale, and ``amax`` f32[]."""
    if not _applies_to(x):
        return False
    amax.copy_(_largest(x, _ONE_SCALE, amax.shape))
    for cast in casts:
        cpu_calls.fp8_encode(x, _groups(x, _ONE_SCALE), 1.0 / cast.scale, cast.codes)
    return True


def dequantize(codes: Tensor, scale: Tensor, grid: Grid, values: Tensor) -> bool:
    """Fills ``values`` [M,K], contiguous and not empty."""
    if not _applies_to(codes):
        return False
    return cpu_calls.fp8_decode(codes, _groups(codes, grid), scale.contiguous(), values)


def _applies_to(matrix: Tensor) -> bool:
    has_rows = matrix.stride(1) == 1 or matrix.shape[1] == 1
    return has_rows and matrix.device.type == "cpu" and cpu_library.library() is not None


def _largest(x: Tensor, grid: Grid, shape: torch.Size) -> Tensor:
    amax = torch.empty(shape, dtype=torch.float32)
    cpu_calls.fp8_largest(x, _groups(x, grid), amax)
    return amax


def _groups(x: Tensor, grid: Grid) -> Fp8Groups:
    rows, columns = grid[0] or x.shape[0], grid[1] or x.shape[1]
    return Fp8Groups(rows, columns, -(-x.shape[1] // columns))
