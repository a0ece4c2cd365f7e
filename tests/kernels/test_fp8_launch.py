"""Launches of FP8 casts: how often x is read, on how many programs, and what new sizes compile."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from graphopt.kernels import fp8_launch_triton
from graphopt.kernels.fp8_format import GRIDS, Cast
from graphopt.kernels.fp8_launch_triton import Scaling, Tile, fill, fill_at_given_scale, has_conversion
from tests.support.absent_gpu import CompilingOnly, pretend_a_gpu

KERNELS = ("cast_kernel", "amax_kernel")


class RecordingOnly:
    """Takes the place of a kernel and notes the grids that it is launched on."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **named: None


@pytest.fixture
def recorded(monkeypatch):
    """The kernel of casts and that of largest magnitudes, neither compiled nor run."""
    kernels = [RecordingOnly(), RecordingOnly()]
    for name, kernel in zip(KERNELS, kernels, strict=True):
        monkeypatch.setattr(fp8_launch_triton, name, kernel)
    return kernels


@pytest.fixture
def compiled(monkeypatch):
    """The same two, compiled at launches and not run."""
    pretend_a_gpu(monkeypatch)
    kernels = [CompilingOnly(getattr(fp8_launch_triton, name)) for name in KERNELS]
    for name, kernel in zip(KERNELS, kernels, strict=True):
        kernel.kernel.device_caches.clear()
        monkeypatch.setattr(fp8_launch_triton, name, kernel)
    yield kernels
    for kernel in kernels:
        kernel.kernel.device_caches.clear()


def casts_of(x, *grids):
    """Casts of x as it lies and, second, of its transpose."""
    first = Cast.empty(x, "e4m3", grids[0])
    return [first, *(Cast.empty(x.t(), "e4m3", grid).t() for grid in grids[1:])]


def test_one_reading_unless_all_rows_share_a_scale(recorded):
    cast, amax = recorded
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    for grid in GRIDS:
        amax.grids.clear()
        fill(x, casts_of(x, grid), power_of_two=False)
        assert amax.grids == ([(2 * 4,)] if grid[0] == 0 else [])
    assert cast.grids == [(8 * 4,), (32,), (8 * 4,), (8 * 4,), (2 * 4,), (2 * 4,)]


def test_both_layouts_and_a_given_scale_are_one_launch(recorded):
    cast, amax = recorded
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    fill(x, casts_of(x, (1, 128), (1, 128)), power_of_two=True)
    given = [Cast(found.codes, torch.ones(1, 1), (0, 0)) for found in casts_of(x, (0, 0), (0, 0))]
    fill_at_given_scale(x, given)
    assert cast.grids == [(2 * 4,)] * 2 and amax.grids == []


def test_new_sizes_of_a_kind_compile_nothing(compiled):
    cast, amax = compiled
    for num_rows, num_columns in ((256, 512), (1024, 512), (16, 4096), (48, 2064)):
        x = torch.zeros(num_rows, num_columns, dtype=torch.bfloat16)
        fill(x, casts_of(x, (0, 0), (0, 0)), power_of_two=False)
    assert (cast.num_compiled, amax.num_compiled) == (1, 1)


def test_tiles_hold_whole_groups_or_wait_for_the_largest_magnitudes():
    x = torch.empty(4096, 4096, device="meta")
    tiles = {grid: Tile.of(casts_of(x, grid)) for grid in GRIDS}
    assert tiles == {
        (0, 0): Tile(32, 128),
        (1, 0): Tile(1, 4096),
        (0, 1): Tile(32, 128),
        (1, 128): Tile(32, 128),
        (128, 1): Tile(128, 128),
        (128, 128): Tile(128, 128),
    }
    waiting = {grid for grid, tile in tiles.items() if Scaling.of(grid, x.shape, tile).source == 1}
    assert waiting == {(0, 0), (0, 1)}


@pytest.mark.parametrize(("columns", "rows", "warps"), [(1, 256, 4), (100, 32, 4), (4096, 1, 4), (16384, 1, 16)])
def test_a_row_is_one_tile_of_32_numbers_a_thread(columns, rows, warps):
    tile = Tile.of(casts_of(torch.empty(64, columns, device="meta"), (1, 0)))
    assert (tile.rows, tile.warps) == (rows, warps) and tile.columns >= columns


def test_codes_of_the_transpose_are_written_from_square_tiles():
    x = torch.empty(4096, 4096, device="meta")
    for grid in GRIDS:
        assert Tile.of(casts_of(x, (1, 128), grid)[1:]) == Tile(128, 128)


def test_a_row_too_long_for_registers_is_read_twice():
    x = torch.empty(64, 16385, device="meta")
    tile = Tile.of(casts_of(x, (1, 0)))
    assert tile == Tile(32, 128) and Scaling.of((1, 0), x.shape, tile).source == 1


def test_a_cpu_has_no_instruction_that_converts():
    assert not has_conversion(torch.device("cpu"))
