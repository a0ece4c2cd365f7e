"""The benchmark of FP8 products: every implementation has a row, and computes the product."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fp8_matmul import BFLOAT16, SHAPES, Shape, decibels_of_a_part, main
from benchmarks.fp8_matmul_table import LEAST_DECIBELS, ProductFigures, product_checks, product_table
from benchmarks.rows import load_rows
from graphopt.errors import DataError
from tests.support.fp8_products import GRIDS, random_product

CPU_ROWS = (
    (BFLOAT16, "torch.mm"),
    ("tensorwise", "emulation"),
    ("tensorwise", "torch._scaled_mm"),
    ("rowwise", "emulation"),
    ("blockwise", "emulation"),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A product of activations and a weight gradient, made tiny."""
    folder = tmp_path_factory.mktemp("results")
    main(shapes="1024x4096x8192,2048x1024x16384", rounds=2, results=folder)
    return load_rows(folder / "fp8-matmul-cpu.jsonl", ProductFigures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the implementations are others")
def test_every_implementation_has_a_row_that_says_it_is_emulation(rows):
    for shape in ("16x64x128", "32x16x256"):
        figures = [row.figures for row in rows if row.subject.model == shape]
        assert tuple((found.recipe, found.implementation) for found in figures) == CPU_ROWS
        assert all(len(found.seconds) == 2 and found.note == "" and "emulated" in found.device for found in figures)
    assert product_table(rows).row_count == len(rows) == 2 * len(CPU_ROWS)


def test_all_compute_the_product(rows):
    found = list(product_checks(rows))
    assert len(found) == 2 * (len(CPU_ROWS) - 1)
    assert all(check.is_met for check in found)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_a_wrong_product_is_found(grids):
    product = random_product(200, 130, 256, grids)
    right = (product.a.value() @ product.b.value()).bfloat16()
    assert decibels_of_a_part(product, right) >= LEAST_DECIBELS
    assert decibels_of_a_part(product, right * 1.01) < LEAST_DECIBELS


def test_there_are_twelve_shapes_and_they_stay_products_when_tiny():
    shapes = [Shape.parse(text) for text in SHAPES.split(",")]
    assert len(shapes) == 12
    assert {shape.m for shape in shapes} >= {1, 16384}
    assert all(side % 16 == 0 and side > 0 for shape in shapes for side in (shape.tiny.n, shape.tiny.k))
    with pytest.raises(DataError, match="M x N x K such as"):
        Shape.parse("12x3")
