"""FP8 casts as ATen operators, so that Inductor fuses them into what makes and what reads their operands.

The bits are those of the operators (``graphopt.kernels.fp8_format``), in a form that writes into no memory. Products of
quantized matrices are not taken apart: each is a kernel, or its emulation.

The largest value is found in float32: torch 2.13's C++ backend cannot reduce bfloat16 while it keeps its roundings.
Each reader converts for itself: what is kept between the two sweeps over a value, if anything, has two bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.ir import ops
from graphopt.ir.fp8_codes import is_quantize, matrix_grids
from graphopt.kernels.fp8_format import Format, Grid, decode, format_named, group_amax, scale_of, spread
from graphopt.operators import fp8

_ONE_SCALE: Grid = (0, 0)

_STORES_TRANSPOSED = (fp8.QUANTIZE_TRANSPOSED, fp8.QUANTIZE_BOTH, fp8.QUANTIZE_DELAYED_BOTH)


def can_fuse(node: fx.Node) -> bool:
    """Whether the FP8 cast ``node`` may be compiled with its neighbours. Else it stays an operator, as others are.

    Blocks must be whole: the C++ backend of torch 2.13 splits a loop of 200 by blocks of 128 and forgets the last 72.
    On CUDA nothing that stores a transpose: Triton miscompiles transposed stores of FP8 values behind a reduction
    (https://github.com/triton-lang/triton/issues/11111), which our own kernels avoid and Inductor does not; and no
    codes where Triton would round twice.
    """
    if not ops.is_fp8_cast(node) or not _has_whole_blocks(node):
        return False
    device = node.all_input_nodes[0].meta["val"].device
    if device.type != "cuda" or node.target is fp8.DEQUANTIZE:
        return True
    return node.target not in _STORES_TRANSPOSED and _triton_rounds_once(device)


def _triton_rounds_once(device: torch.device) -> bool:
    from graphopt.kernels.fp8_launch_triton import has_conversion  # Triton exists on Linux alone

    return has_conversion(device)


def _has_whole_blocks(node: fx.Node) -> bool:
    """Whether every block of ``node``, of the matrix or of its transpose, is a full one."""
    extents = node.all_input_nodes[0].meta["val"].shape
    grids: Any = matrix_grids(node) if is_quantize(node) else (ops.argument(node, 2, "block"),)
    return all(
        size == 0 or extent <= size or extent % size == 0
        for grid in grids
        for extent, size in zip(extents, grid, strict=True)
    )


def _quantize(x: Tensor, format: str, block: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    kind, grid = format_named(format), _grid(block, x)
    scale = scale_of(group_amax(x.to(torch.float32), grid), kind, power_of_two=power_of_two)
    return _encode(x, scale, grid, kind), scale


def _quantize_transposed(x: Tensor, format: str, block: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows, columns = block
    codes, scale = _quantize(x, format, (columns, rows), power_of_two)
    return _turned(codes), _turned(scale)


def _quantize_both(
    x: Tensor, format: str, block: Sequence[int], block_t: Sequence[int], power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_quantize(x, format, block, power_of_two), *_quantize_transposed(x, format, block_t, power_of_two))


def _quantize_delayed(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return _encode(x, scale, _ONE_SCALE, format_named(format)), group_amax(x.to(torch.float32), _ONE_SCALE).reshape(())


def _quantize_delayed_both(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    codes, amax = _quantize_delayed(x, scale, format)
    return codes, _turned(codes), amax


def _dequantize(codes: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return decode(codes, scale, _grid(block, codes)).to(dtype)


FP8_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    fp8.QUANTIZE: _quantize,
    fp8.QUANTIZE_TRANSPOSED: _quantize_transposed,
    fp8.QUANTIZE_BOTH: _quantize_both,
    fp8.QUANTIZE_DELAYED: _quantize_delayed,
    fp8.QUANTIZE_DELAYED_BOTH: _quantize_delayed_both,
    fp8.DEQUANTIZE: _dequantize,
}


def _encode(x: Tensor, scale: Tensor, grid: Grid, format: Format) -> Tensor:
    """The codes of x [M,K]; NaN becomes the NaN without a sign."""
    scaled = x.to(torch.float32) * spread(1.0 / scale, grid, x.shape)
    within = scaled.clamp(-format.largest, format.largest)
    return torch.where(scaled != scaled, torch.full_like(scaled, torch.nan), within).to(format.dtype)


def _turned(matrix: Tensor) -> Tensor:
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _grid(block: Sequence[int], matrix: Tensor) -> Grid:
    """``block`` with 0, the whole extent, for a size that no group of ``matrix`` fills."""
    rows, columns = (0 if size >= extent > 0 else size for size, extent in zip(block, matrix.shape, strict=True))
    return rows, columns
