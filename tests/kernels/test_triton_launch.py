"""Launching the Triton kernels: one launch for a list, and nothing compiled again for new numbers or addresses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


from graphopt.kernels import block_adam_triton, block_lion_triton
from graphopt.kernels.block_update import flat_items
from graphopt.kernels.launch_triton import Tiling, is_aligned, tile_table
from tests.support.absent_gpu import CompilingOnly, pretend_a_gpu
from tests.support.blocks import adam_scalars, item_of, lion_scalars, options

KERNELS = {
    "adam": (block_adam_triton, "block_adam_kernel", adam_scalars, 2),
    "lion": (block_lion_triton, "block_lion_kernel", lion_scalars, 1),
}


@pytest.fixture(params=KERNELS)
def launched(request, monkeypatch):
    pretend_a_gpu(monkeypatch)
    module, name, scalars_of, num_moments = KERNELS[request.param]
    kernel = CompilingOnly(getattr(module, name))
    kernel.kernel.device_caches.clear()
    monkeypatch.setattr(module, name, kernel)

    def launch(step=1, factor=1.0, sizes=(1000, 2048), shift=0, **changed):
        items = [item_of(torch.randn(size + 4)[4:], torch.randn(size), num_moments=num_moments) for size in sizes]
        scale = None if factor is None else torch.tensor([0.0] * shift + [factor])[shift]
        module.update_(flat_items(items, options(), step), scalars_of(step, **changed), options(), scale)

    yield kernel, launch
    kernel.kernel.device_caches.clear()


def test_new_numbers_and_addresses_compile_nothing(launched):
    kernel, launch = launched
    launch()
    assert kernel.num_compiled == 1
    for step in (2, 16, 10_001):
        launch(step=step)
    for changed in ({"lr": 0.0}, {"lr": 1.0}, {"weight_decay": 0.0}, {"beta1": 0.5}):
        launch(**changed)
    for factor in (None, 0.25, float("inf")):
        launch(factor=factor)
    launch(shift=1)
    for sizes in ((1,), (5000, 16, 300), (1024,) * 40):
        launch(sizes=sizes)
    assert kernel.num_compiled == 1


def test_a_list_of_parameters_is_one_launch(launched):
    kernel, launch = launched
    launch(sizes=(1, 1024, 1025, 5000))
    assert kernel.grids == [(1 + 1 + 2 + 5,)]


def test_no_parameters_are_no_launch(launched):
    kernel, launch = launched
    launch(sizes=())
    launch(sizes=(0, 0))
    assert kernel.grids == []


def test_each_tile_knows_its_parameter():
    table = tile_table((1024, 1, 2049), 1024, torch.device("cpu"))
    assert table.tolist() == [0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("block", "elements", "warps"), [(1, 1024, 4), (100, 800, 4), (256, 1024, 4), (2048, 2048, 8), (16384, 16384, 32)]
)
def test_tiles_hold_whole_blocks(block, elements, warps):
    tiling = Tiling.of(block)
    assert (tiling.elements, tiling.warps) == (elements, warps)


def test_wide_loads_are_chosen_where_everything_lies_on_16_bytes():
    whole, askew = torch.zeros(1028), torch.zeros(1028)[1:]
    for parameter, gradient, expected in ((whole, whole, True), (askew, askew, False), (whole[1:], askew, False)):
        items = flat_items([item_of(parameter, gradient)], options(), 1)
        assert is_aligned(items, Tiling.of(256)) is expected
    items = flat_items([item_of(whole, whole, block=100)], options(block=100), 1)
    assert not is_aligned(items, Tiling.of(100))
