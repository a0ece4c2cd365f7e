"""FP8 casts in plain torch on pieces of a bounded size, where nothing is compiled. The bits of ``fp8_format``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.kernels.fp8_format import NAN_CODE, Cast, Format, Grid, format_of, grid_shape, scale_of, spread

# Elements of a piece: float32 temporaries of 256 KiB stay in a second-level cache.
ELEMENTS_OF_A_PIECE = 1 << 16
SIDE = 128


@dataclass(frozen=True)
class Piece:
    """Some rows and columns of a matrix [M,K]: whole groups of each grid in use that does not span all rows."""

    rows: slice
    columns: slice

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[self.rows, self.columns]

    def of_scales(self, scale: Tensor, grid: Grid) -> Tensor:
        """View of the scales of this piece."""
        return scale[_groups(self.rows, grid[0]), _groups(self.columns, grid[1])]


def pieces(shape: torch.Size, grids: Sequence[Grid]) -> Iterator[Piece]:
    """Pieces that cover a matrix of ``shape``, each with whole groups of ``grids`` but for those that span all rows."""
    num_rows, num_columns = shape
    rows_of_a_group = max(grid[0] for grid in grids) or 1
    is_whole = any(grid == (1, 0) for grid in grids)
    columns = num_columns if is_whole else max(SIDE, ELEMENTS_OF_A_PIECE // rows_of_a_group)
    rows = max(1, ELEMENTS_OF_A_PIECE // (min(columns, num_columns) * rows_of_a_group)) * rows_of_a_group
    for row in range(0, num_rows, rows):
        for column in range(0, num_columns, columns):
            yield Piece(slice(row, min(num_rows, row + rows)), slice(column, min(num_columns, column + columns)))


def fill(x: Tensor, casts: Sequence[Cast], *, power_of_two: bool) -> None:
    """Fills one or two ``casts`` of x [M,K], not empty; each in the orientation of x."""
    for cast in casts:
        if cast.grid[0] == 0:
            amax = _amax_over_rows(x, cast.grid)
            cast.scale.copy_(scale_of(amax, format_of(cast.codes), power_of_two=power_of_two))
    for piece in pieces(x.shape, [cast.grid for cast in casts]):
        values = piece.of(x)
        for cast in casts:
            scale = piece.of_scales(cast.scale, cast.grid)
            if cast.grid[0] != 0:
                scale.copy_(scale_of(_amax(values, cast.grid), format_of(cast.codes), power_of_two=power_of_two))
            holds_nan = not _is_finite(scale)
            piece.of(cast.codes).copy_(_codes(values, scale, cast.grid, format_of(cast.codes), holds_nan=holds_nan))


def fill_at_given_scale(x: Tensor, casts: Sequence[Cast], amax: Tensor) -> None:
    """Fills the codes of ``casts``, one or two, of x [M,K], not empty, at their scale, and raises ``amax`` f32[]."""
    scale, grid, format = casts[0].scale, casts[0].grid, format_of(casts[0].codes)
    for piece in pieces(x.shape, [grid]):
        values = piece.of(x)
        here = _amax(values, grid).reshape(())
        torch.maximum(amax, here, out=amax)
        codes = _codes(values, scale, grid, format, holds_nan=not (_is_finite(here) and _is_finite(scale)))
        for cast in casts:
            piece.of(cast.codes).copy_(codes)


def dequantize(codes: Tensor, scale: Tensor, grid: Grid, values: Tensor) -> None:
    """Fills ``values`` [M,K], not empty, with ``codes * scale``, rounded once."""
    for piece in pieces(codes.shape, [grid]):
        piece.of(values).copy_(_scaled(piece.of(codes).float(), piece.of_scales(scale, grid), grid))


def _amax_over_rows(x: Tensor, grid: Grid) -> Tensor:
    """The largest magnitudes of x in a grid, (0, 0) or (0, 1), whose groups span all rows; NaN as in ``group_amax``."""
    amax = torch.zeros(1, x.shape[1] if grid[1] == 1 else 1, device=x.device)
    for piece in pieces(x.shape, [grid]):
        here = piece.of_scales(amax, grid)
        torch.maximum(here, _amax(piece.of(x), grid), out=here)
    return amax


def _amax(values: Tensor, grid: Grid) -> Tensor:
    """What ``group_amax`` gives, by integers: without their sign the bits of floats are in the order of the values."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    magnitude = values.view(integer) & torch.iinfo(integer).max
    groups = _grouped(magnitude, grid)
    if groups is None:
        num_rows, num_columns = grid_shape(values.shape, grid)
        padding = (0, num_columns * (grid[1] or 1) - values.shape[1], 0, num_rows * (grid[0] or 1) - values.shape[0])
        groups = _grouped(torch.nn.functional.pad(magnitude, tuple(max(0, size) for size in padding)), grid)
    assert groups is not None, f"{grid} does not divide a piece {list(values.shape)} after padding"
    return groups.amax(1).amax(2).view(values.dtype).float()


def _codes(values: Tensor, scale: Tensor, grid: Grid, format: Format, *, holds_nan: bool) -> Tensor:
    """What ``encode`` gives; to look for NaN takes as long as all the rest, so the caller says if there may be any."""
    scaled = _scaled(values, 1.0 / scale, grid).clamp_(-format.largest, format.largest)
    codes = scaled.to(format.dtype)
    if holds_nan:
        codes.view(torch.uint8).masked_fill_(scaled.isnan(), NAN_CODE)
    return codes


def _scaled(values: Tensor, factor: Tensor, grid: Grid) -> Tensor:
    """f32: ``values`` times the factors of their groups."""
    groups = _grouped(values, grid)
    if groups is None:
        return values * spread(factor, grid, values.shape)
    return (groups * factor[:, None, :, None]).view(values.shape)


def _grouped(values: Tensor, grid: Grid) -> Tensor | None:
    """View [groups, rows of a group, groups, columns of one]; None where ragged groups are at an edge."""
    (rows, columns), shape = grid, values.shape
    rows, columns = rows or shape[0], columns or shape[1]
    if shape[0] % rows or shape[1] % columns:
        return None
    return values.reshape(shape[0] // rows, rows, shape[1] // columns, columns)


def _is_finite(numbers: Tensor) -> bool:
    return bool(torch.isfinite(numbers).all())


def _groups(elements: slice, size: int) -> slice:
    """The groups of ``size`` (0: one for all) that ``elements`` lie in; a slice begins with a whole group."""
    return slice(0, 1) if size == 0 else slice(elements.start // size, -(-elements.stop // size))
