"""The Triton kernels of FP8 products without a GPU: interpreted against the reference, compiled for each target."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("triton")

from graphopt.kernels.fp8_matmul_tiles import BLOCK_TILES, FAST_TILES, TILES, WIDE, Family, Form, Tile
from graphopt.kernels.fp8_product import Product
from tests.support.fp8_products import GRIDS, KERNEL_DECIBELS, random_product
from tests.support.matmul_targets import (
    FP8_INSTRUCTIONS,
    OTHER_INSTRUCTIONS,
    SHARED_BYTES,
    compile_product,
)

FAMILIES = {89: Family.ADA, 90: Family.HOPPER, 100: Family.BLACKWELL, 120: Family.ADA}


@pytest.fixture(scope="module")
def interpreted():
    """Triton decides when it is imported whether it interprets, so a process of its own runs the cases."""
    if version("triton").startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 takes bounds of loops as numbers, which NumPy 2.4 refuses")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_products"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreted_kernels_give_the_exact_product_of_the_codes(interpreted):
    measured = {name: value for name, value in interpreted.items() if not isinstance(value, bool)}
    assert len(measured) > 55
    assert {name: value for name, value in measured.items() if value is not None and value < KERNEL_DECIBELS} == {}


def test_zeros_not_numbers_and_layouts_are_handled(interpreted):
    checked = {name: value for name, value in interpreted.items() if isinstance(value, bool)}
    assert len(checked) == 7
    assert [name for name, holds in checked.items() if not holds] == []


def assert_compiles_well(product: Product, tile: Tile, arch: int) -> None:
    """No spills, room in shared memory, products of FP8 by the matrix unit of FP8."""
    compiled = compile_product(product, tile, arch)
    named = f"{tile} for sm_{arch}, {product.a.grid} x {product.b.grid} to {product.dtype}"
    assert (compiled.stack_bytes, compiled.local_bytes) == (0, 0), named
    assert compiled.shared_bytes <= SHARED_BYTES[arch], named
    assert compiled.operations[FP8_INSTRUCTIONS[arch]], named
    assert not any(compiled.operations[other] for other in OTHER_INSTRUCTIONS), named


def large(name: str, dtype: torch.dtype = torch.bfloat16, **options) -> Product:
    return random_product(128, 256, 512, GRIDS[name], bias=torch.zeros(256, dtype=dtype), dtype=dtype, **options)


@pytest.mark.parametrize(
    ("arch", "grids", "formats"),
    [
        (89, "tensorwise", ("e4m3", "e5m2")),
        (90, "blockwise", ("e4m3", "e4m3")),
        (100, "rowwise", ("e5m2", "e4m3")),
    ],
)
def test_the_matrix_unit_of_fp8_is_used_and_nothing_spills(arch, grids, formats):
    tiles = BLOCK_TILES if grids == "blockwise" else TILES
    tile = next(tile for tile in tiles[FAMILIES[arch]][Form.SQUARE] if tile.n < WIDE)
    assert_compiles_well(large(grids, formats=formats), tile, arch)


def test_tiles_travel_by_descriptors_or_in_wide_words():
    for arch, loads, stores in ((89, "LDGSTS", "STG"), (90, "UTMALDG", "UTMASTG")):
        tile = TILES[FAMILIES[arch]][Form.FEW_ROWS][0]
        compiled = compile_product(large("tensorwise"), tile, arch)
        assert compiled.operations[loads] and compiled.operations[stores]
        assert "cvt.rn.bf16x2.f32" in compiled.ptx  # one rounding, to nearest
        if arch == 89:
            assert "cp.async.cg.shared.global [ %r" in compiled.ptx and ", 0x10" in compiled.ptx


@pytest.mark.slow
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("grids", GRIDS)
def test_no_tile_spills(arch, grids):
    family = FAMILIES[arch]
    has_block_scales = grids.startswith("blockwise")
    tiles = [tile for form in Form for tile in (BLOCK_TILES if has_block_scales else TILES)[family][form]]
    products = [large(grids), large(grids, torch.float32)]
    for product in products:
        wide = product.dtype.itemsize == 2 and grids == "tensorwise"
        for tile in dict.fromkeys(tiles):
            if tile.n < WIDE or wide:
                assert_compiles_well(product, tile, arch)


@pytest.mark.slow
def test_fast_accumulation_does_not_spill():
    product = replace(large("tensorwise"), fast_accumulation=True)
    for tile in FAST_TILES:
        assert_compiles_well(product, tile, 90)


@pytest.mark.slow
def test_other_forms_do_not_spill():
    narrow = random_product(1, 1, 512, GRIDS["rowwise"])  # sizes of 1 become constants
    for arch, family in FAMILIES.items():
        assert_compiles_well(narrow, TILES[family][Form.FEW_ROWS][0], arch)
        assert_compiles_well(large("tensorwise", torch.float16), TILES[family][Form.SQUARE][-1], arch)
    swapped = large("tensorwise")
    both = Product(
        type(swapped.a)(swapped.a.codes.t().contiguous().t(), swapped.a.scale, swapped.a.grid),
        type(swapped.b)(swapped.b.codes.contiguous(), swapped.b.scale, swapped.b.grid),
        None,
        torch.bfloat16,
    )
    for tile in TILES[Family.BLACKWELL][Form.SQUARE]:
        assert_compiles_well(both, tile, 100)
