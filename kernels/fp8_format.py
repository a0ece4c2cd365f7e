"""What FP8 numbers are and how a tensor becomes them: formats, grids of scales, and the rule of a scale.

Legend: x [M,K]; a grid ``(rows, columns)`` says how many of each share a scale, 0 for all; scale f32 of shape
[ceil(M / rows), ceil(K / columns)], and ``x ~ codes * scale``. Grids in use: (0, 0) one scale for a tensor, (1, 0) one
for each row, (0, 1) for each column, (1, 128) and (128, 1) for stretches of them, (128, 128) for tiles.

The rule of a scale: ``amax / largest`` in float32; of a group of zeros 1; at least ``SMALLEST_SCALE``, so that its
reciprocal is finite; NaN if the group holds Inf or NaN, so that all that is computed with it is NaN and cannot hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: below it the reciprocal overflows."""

Grid = tuple[int, int]

GRIDS: tuple[Grid, ...] = ((0, 0), (1, 0), (0, 1), (1, 128), (128, 1), (128, 128))
NAN_CODE = 0x7F
"""The code of NaN in both formats, here always without a sign: processors differ in the sign that a NaN gets."""


@dataclass(frozen=True)
class Format:
    """An FP8 format: its dtype and its largest finite number."""

    name: str
    dtype: torch.dtype
    largest: float


FORMATS = {
    "e4m3": Format("e4m3", torch.float8_e4m3fn, 448.0),
    "e5m2": Format("e5m2", torch.float8_e5m2, 57344.0),
}


def format_named(name: str) -> Format:
    """The format called ``name``; ValueError for others."""
    if name not in FORMATS:
        raise ValueError(f"an FP8 format is one of {', '.join(FORMATS)}, came {name!r}")
    return FORMATS[name]


def format_of(codes: Tensor) -> Format:
    """The format that ``codes`` are in; TypeError where they are not FP8."""
    for format in FORMATS.values():
        if codes.dtype == format.dtype:
            return format
    names = " or ".join(str(format.dtype) for format in FORMATS.values())
    raise TypeError(f"expected FP8 codes in {names}, got {codes.dtype}; quantize_fp8 makes them")


def check_grid(grid: Grid) -> None:
    """Raises ValueError for a grid that is not in use."""
    if grid not in GRIDS:
        raise ValueError(f"expected a block among {', '.join(map(str, GRIDS))}, got {grid}; 0 stands for a whole dim")


def grid_shape(shape: torch.Size | tuple[int, ...], grid: Grid) -> tuple[int, int]:
    """The shape of the scales of a tensor [M,K] of ``shape``."""
    rows, columns = (extent if size == 0 else size for extent, size in zip(shape, grid, strict=True))
    return _ceil_div(shape[0], rows), _ceil_div(shape[1], columns)


def group_amax(x: Tensor, grid: Grid) -> Tensor:
    """The largest absolute value of each group of x [M,K], in float32; NaN where a group holds NaN."""
    num_rows, num_columns = grid_shape(x.shape, grid)
    if not x.numel():
        return torch.zeros(num_rows, num_columns, device=x.device)
    magnitude = x.abs()
    rows, columns = (size or extent for extent, size in zip(x.shape, grid, strict=True))
    if num_rows * rows != x.shape[0] or num_columns * columns != x.shape[1]:
        padding = (0, num_columns * columns - x.shape[1], 0, num_rows * rows - x.shape[0])
        magnitude = torch.nn.functional.pad(magnitude, padding)
    return magnitude.reshape(num_rows, rows, num_columns, columns).amax(dim=(1, 3)).float()


def scale_of(amax: Tensor, format: Format, *, power_of_two: bool) -> Tensor:
    """The scale of groups whose largest absolute values are ``amax``; see the rule above."""
    scale = (amax / format.largest).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        scale = next_power_of_two(scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


def next_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below ``scale`` (normal, positive float32), by its bits."""
    bits = scale.view(torch.int32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000
    return exponent.view(torch.float32)


def spread(scale: Tensor, grid: Grid, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """``scale`` for each element of a tensor [M,K] of ``shape``, or in a shape that broadcasts to it."""
    for dim, (size, extent) in enumerate(zip(grid, shape, strict=True)):
        if size > 1:
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, extent)
    return scale


def encode(x: Tensor, scale: Tensor, grid: Grid, format: Format) -> Tensor:
    """The codes of x [M,K]: ``x / scale`` rounded to nearest even; what is beyond the range becomes the largest."""
    scaled = x.float() * spread(1.0 / scale, grid, x.shape)
    codes = scaled.clamp_(-format.largest, format.largest).to(format.dtype)
    codes.view(torch.uint8).masked_fill_(scaled.isnan(), NAN_CODE)
    return codes


def decode(codes: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """``codes * scale`` in float32."""
    return codes.float() * spread(scale, grid, codes.shape)


@dataclass(frozen=True)
class Cast:
    """FP8 codes [M,K], lying in any way, and f32 scales in the shape of ``grid``."""

    codes: Tensor
    scale: Tensor
    grid: Grid

    @classmethod
    def empty(cls, x: Tensor, format: str, grid: Grid) -> Cast:
        """Room for the cast of x [M,K], contiguous. Raises ValueError for a format or grid that is not in use."""
        check_grid(grid)
        codes = torch.empty(tuple(x.shape), dtype=format_named(format).dtype, device=x.device)
        return cls(codes, torch.empty(grid_shape(x.shape, grid), dtype=torch.float32, device=x.device), grid)

    def t(self) -> Cast:
        """The cast of the transpose: views of this one."""
        return Cast(self.codes.t(), self.scale.t(), (self.grid[1], self.grid[0]))


def _ceil_div(extent: int, size: int) -> int:
    return -(-extent // size) if size else 1
