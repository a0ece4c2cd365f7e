"""A matrix to FP8 codes and scales, as it lies, transposed, or both in one reading; and back.

Formula and reference are in ``fp8_format``; what stands here gives its bits: by Triton for CUDA, compiled on a CPU
(``fp8_compiled``), elsewhere in plain torch on bounded pieces (``fp8_pieces``). x [M,K] is f32, bf16 or f16 and may lie
in any way; codes and scales are contiguous. Formats and grids that are not in use raise ValueError, other dtypes of x
TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.kernels import fp8_compiled, fp8_pieces
from graphopt.kernels.fp8_format import Cast, Grid, check_grid, format_named, format_of, grid_shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ONE_SCALE: Grid = (0, 0)


def quantize(x: Tensor, format: str, grid: Grid, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes [M,K] of x and their scales, f32 in the shape of ``grid``."""
    _check(x)
    cast = Cast.empty(x, format, grid)
    _fill(x, (cast,), power_of_two=power_of_two)
    return cast.codes, cast.scale


def quantize_both(
    x: Tensor, format: str, grid: Grid, grid_t: Grid, *, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [M,K] and scales of x in ``grid``, then codes [K,M] and scales of its transpose in ``grid_t``."""
    _check(x)
    cast, turned = Cast.empty(x, format, grid), Cast.empty(x.t(), format, grid_t)
    _fill(x, (cast, turned.t()), power_of_two=power_of_two)
    return cast.codes, cast.scale, turned.codes, turned.scale


def quantize_delayed(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Codes [M,K] of x at ``scale`` f32[1,1], saturating, and the largest magnitude of x, f32[], NaN if x holds one."""
    casts = (_at_scale(x, scale, format),)
    return casts[0].codes, _fill_at_given_scale(x, casts)


def quantize_delayed_both(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """As ``quantize_delayed``, with codes [K,M] of the transpose between the two."""
    cast, turned = _at_scale(x, scale, format), _at_scale(x.t(), scale, format)
    amax = _fill_at_given_scale(x, (cast, turned.t()))
    return cast.codes, turned.codes, amax


def dequantize(codes: Tensor, scale: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """``codes * scale`` [M,K] in float32, rounded once to ``dtype``; contiguous, codes may lie in any way."""
    check_grid(grid)
    format_of(codes)
    if dtype not in FLOATS:
        raise TypeError(f"expected to dequantize to float32, bfloat16 or float16, got {dtype}")
    expected = grid_shape(codes.shape, grid)
    if scale.shape != expected or scale.dtype != torch.float32:
        raise ValueError(
            f"expected scales float32{list(expected)} for codes {list(codes.shape)} in blocks of {grid}, got "
            f"{scale.dtype}{list(scale.shape)}; pass the scale and the block that the codes were made with"
        )
    if codes.is_cuda:
        from graphopt.kernels import fp8_dequantize_triton  # Triton exists on Linux alone

        return fp8_dequantize_triton.dequantize(codes, scale, grid, dtype)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel() and not fp8_compiled.dequantize(codes, scale, grid, values):
        fp8_pieces.dequantize(codes, scale, grid, values)
    return values


def _fill(x: Tensor, casts: Sequence[Cast], *, power_of_two: bool) -> None:
    if not x.numel():
        for cast in casts:
            cast.scale.fill_(1.0)
        return
    x, casts = _with_contiguous_rows(x, casts)
    if x.is_cuda:
        from graphopt.kernels import fp8_launch_triton  # Triton exists on Linux alone

        fp8_launch_triton.fill(x, casts, power_of_two=power_of_two)
    elif not fp8_compiled.fill(x, casts, power_of_two=power_of_two):
        fp8_pieces.fill(x, casts, power_of_two=power_of_two)


def _fill_at_given_scale(x: Tensor, casts: Sequence[Cast]) -> Tensor:
    amax = torch.zeros((), device=x.device)
    if not x.numel():
        return amax
    x, casts = _with_contiguous_rows(x, casts)
    if x.is_cuda:
        from graphopt.kernels import fp8_launch_triton  # Triton exists on Linux alone

        return fp8_launch_triton.fill_at_given_scale(x, casts).reshape(())
    if not fp8_compiled.fill_at_given_scale(x, casts, amax):
        fp8_pieces.fill_at_given_scale(x, casts, amax)
    return amax


def _with_contiguous_rows(x: Tensor, casts: Sequence[Cast]) -> tuple[Tensor, Sequence[Cast]]:
    """x and its casts, all transposed where x is the transpose of a matrix with contiguous rows."""
    if x.stride(0) == 1 and x.stride(1) != 1:
        return x.t(), [cast.t() for cast in casts]
    return x, casts


def _at_scale(x: Tensor, scale: Tensor, format: str) -> Cast:
    _check(x)
    if scale.shape != (1, 1) or scale.dtype != torch.float32 or scale.device != x.device:
        raise ValueError(
            f"expected a scale float32[1, 1] on {x.device}, got {scale.dtype}{list(scale.shape)} on {scale.device}; "
            "a delayed scale is one number for the whole tensor"
        )
    codes = torch.empty(tuple(x.shape), dtype=format_named(format).dtype, device=x.device)
    return Cast(codes, scale, ONE_SCALE)


def _check(x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(
            f"expected a matrix in float32, bfloat16 or float16 to quantize, got {x.dtype}; convert it first"
        )
    if x.dim() != 2:
        raise ValueError(f"expected a matrix to quantize, got shape {list(x.shape)}; reshape it to two dims first")
