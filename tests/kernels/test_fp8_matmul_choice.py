"""How an implementation of an FP8 product is chosen on a GPU, and launched; without a GPU."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton

from graphopt.kernels import fp8_matmul_choice, fp8_matmul_launch
from graphopt.kernels.fp8_matmul_choice import SCALED_MM, candidates, copies, fastest, load, shape_class, store
from graphopt.kernels.fp8_matmul_cpu import emulate
from graphopt.kernels.fp8_matmul_tiles import Family, Form, family_of, form_of, promote_every, tiles_for
from graphopt.kernels.fp8_product import reference
from graphopt.kernels.fp8_support import support_of
from tests.support.absent_gpu import CompilingOnly, absent_driver
from tests.support.fp8_products import FORMATS, GRIDS, KERNEL_DECIBELS, decibels, random_product

HOPPER, BLACKWELL = support_of((9, 0)), support_of((10, 0))


@pytest.fixture
def chooser(monkeypatch, tmp_path):
    """``run`` with two implementations that take 2 and 1 milliseconds; what was timed is in the list."""
    timed = []

    def milliseconds(run):
        timed.append(run.func)
        return {slow: 2.0, fast: 1.0}[run.func]

    def slow(product):
        return emulate(product)

    def fast(product):
        return emulate(product)

    monkeypatch.setattr(fp8_matmul_choice, "_file", lambda device: tmp_path / "choices.json")
    monkeypatch.setattr(fp8_matmul_choice, "candidates", lambda product, support: {"slow": slow, "fast": fast})
    monkeypatch.setattr(fp8_matmul_choice, "_median_milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fp8_matmul_choice._choices.cache_clear()
    yield timed
    fp8_matmul_choice._choices.cache_clear()


def test_the_fastest_is_measured_once_for_a_class_of_shapes(chooser):
    for m in (70, 100, 128):
        fp8_matmul_choice.run(random_product(m, 32, 48), HOPPER)
    assert len(chooser) == 2
    fp8_matmul_choice.run(random_product(129, 32, 48), HOPPER)
    assert len(chooser) == 4
    found = fp8_matmul_choice.choices(torch.device("cpu"))
    assert [choice.implementation for choice in found] == ["fast", "fast"]
    assert found[0].best_milliseconds == 1.0 and found[0].milliseconds["slow"] == 2.0


def test_a_later_process_measures_nothing_again(chooser):
    product = random_product(70, 32, 48)
    fp8_matmul_choice.run(product, HOPPER)
    fp8_matmul_choice._choices.cache_clear()  # what a new process begins with
    fp8_matmul_choice.run(product, HOPPER)
    assert len(chooser) == 2


def test_nothing_is_measured_while_a_cuda_graph_is_recorded(chooser, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    product = random_product(70, 32, 48)
    assert torch.equal(fp8_matmul_choice.run(product, HOPPER), emulate(product))
    assert chooser == [] and fp8_matmul_choice.choices(torch.device("cpu")) == ()


def test_it_is_measured_on_the_device_of_the_product(chooser, monkeypatch):
    entered = []

    @contextmanager
    def on_device(device):
        entered.append(device)
        yield
        assert len(chooser) == 2, "measured inside"

    monkeypatch.setattr(fp8_matmul_choice, "on_device", on_device)
    fp8_matmul_choice.run(random_product(70, 32, 48), HOPPER)
    assert entered == [torch.device("cpu")]


def test_what_fails_is_noted_and_not_chosen():
    def failing(product):
        raise RuntimeError("no kernel\nimage")

    product = random_product(16, 16, 16)
    choice = fastest(product, {"failing": failing, "working": emulate}, lambda run: run() is not None and 3.0)
    assert choice.implementation == "working" and choice.milliseconds["failing"] is None
    assert choice.notes == ("failing failed: no kernel image",)
    with pytest.raises(RuntimeError, match=r"no implementation computes .* failing failed: no kernel image"):
        fastest(product, {"failing": failing}, lambda run: run())


def test_a_file_of_something_else_is_measured_again(tmp_path):
    path = tmp_path / "choices.json"
    assert load(path) == {}
    for text in ("{", '[{"shapes": "x"}]', json.dumps([{"other": 1, "notes": []}])):
        path.write_text(text)
        assert load(path) == {}
    choice = fastest(random_product(16, 16, 16), {"one": emulate}, lambda run: 1.0, notes=("a note",))
    store(path, {choice.shapes: choice})
    assert load(path) == {choice.shapes: choice}


def test_scaled_mm_is_a_candidate_where_it_takes_the_product():
    bias = torch.zeros(32)
    expected = {
        "tensorwise": (random_product(16, 32, 64), True),
        "to float32 with bias": (random_product(16, 32, 64, bias=bias), False),
        "with bias": (random_product(16, 32, 64, bias=bias.bfloat16(), dtype=torch.bfloat16), True),
        "rowwise": (random_product(16, 32, 64, GRIDS["rowwise"], dtype=torch.bfloat16), True),
        "rowwise to float32": (random_product(16, 32, 64, GRIDS["rowwise"]), False),
        "blockwise": (random_product(16, 32, 64, GRIDS["blockwise"], dtype=torch.bfloat16), False),
        "odd": (random_product(16, 32, 60), False),
    }
    found = {name: SCALED_MM in candidates(product, HOPPER) for name, (product, _) in expected.items()}
    assert found == {name: takes for name, (_, takes) in expected.items()}


def test_every_tile_is_a_candidate():
    for grids in GRIDS.values():
        product = random_product(128, 128, 128, grids, dtype=torch.bfloat16)
        for support in (HOPPER, BLACKWELL):
            num_triton = len([name for name in candidates(product, support) if name != SCALED_MM])
            assert num_triton == len(tiles_for(product, family_of(support)))


def test_scaled_mm_computes_the_product():
    for formats in FORMATS:
        product = random_product(33, 48, 64, formats=formats)
        assert decibels(reference(product), fp8_matmul_choice._by_scaled_mm(product)) >= KERNEL_DECIBELS


def test_a_class_tells_apart_what_is_compiled_or_timed_apart():
    product = random_product(100, 48, 64)
    assert shape_class(product) == "square 128x64x64 e4m3fn[0, 0] e4m3fn[0, 0] float32"
    changed = (
        replace(product, dtype=torch.bfloat16),
        replace(product, bias=torch.zeros(48)),
        replace(product, fast_accumulation=True),
        replace(product, b=replace(product.b, codes=product.b.codes.contiguous())),
        random_product(100, 48, 64, GRIDS["rowwise"]),
        random_product(100, 48, 64, formats=("e5m2", "e4m3")),
        random_product(200, 48, 64),
    )
    assert len({shape_class(product), *map(shape_class, changed)}) == 1 + len(changed)


def test_copies_are_told():
    product = random_product(64, 48, 64)
    turned = replace(product, b=replace(product.b, codes=product.b.codes.contiguous()))
    assert copies(product, HOPPER) == ()
    assert [note.partition(" is copied")[0] for note in copies(turned, HOPPER)] == ["b"]
    assert copies(turned, BLACKWELL) == ()


def test_tiles_follow_the_shape_the_scales_and_the_device():
    assert form_of(64, 4096, 4096) is Form.FEW_ROWS
    assert form_of(8192, 4096, 4096) is Form.SQUARE
    assert form_of(1024, 4096, 16384) is Form.LONG
    families = [family_of(support_of(capability)) for capability in ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0))]
    assert families == [Family.ADA, Family.HOPPER, Family.BLACKWELL, Family.BLACKWELL, Family.ADA]
    product = random_product(128, 128, 128, GRIDS["blockwise"])
    assert {tile.k for family in Family for tile in tiles_for(product, family)} == {128}
    wide = random_product(128, 128, 128, dtype=torch.bfloat16)
    assert max(tile.n for tile in tiles_for(wide, Family.BLACKWELL)) == 256
    assert max(tile.n for tile in tiles_for(replace(wide, dtype=torch.float32), Family.BLACKWELL)) == 128


def test_hopper_sums_in_float32_unless_asked_for_fast_sums():
    product = random_product(128, 128, 512, dtype=torch.bfloat16)
    tile = tiles_for(product, Family.HOPPER)[0]
    assert promote_every(Family.HOPPER, tile, fast_accumulation=False) == 128
    assert promote_every(Family.HOPPER, tile, fast_accumulation=True) is None
    assert promote_every(Family.BLACKWELL, tile, fast_accumulation=False) is None
    fast = tiles_for(replace(product, fast_accumulation=True), Family.HOPPER)
    assert fast[0].n == 256 > tile.n


def test_other_numbers_of_rows_compile_nothing_and_programs_are_at_most_the_tiles(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", absent_driver(90))
    kernel = CompilingOnly(fp8_matmul_launch.fp8_matmul_kernel)
    kernel.kernel.device_caches.clear()
    monkeypatch.setattr(fp8_matmul_launch, "fp8_matmul_kernel", kernel)
    for m in (129, 160, 1000, 2048):
        product = random_product(m, 256, 64, GRIDS["rowwise"], dtype=torch.bfloat16)
        tile = tiles_for(product, Family.HOPPER)[0]
        fp8_matmul_launch.multiply(product, tile, HOPPER, num_programs=16)
    assert kernel.grids == [(4,), (4,), (16,), (16,)]
    assert kernel.num_compiled == 1
    kernel.kernel.device_caches.clear()
