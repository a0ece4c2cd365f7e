"""Producers with their FP8 cast, measured on small matrices."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import fp8_fusion
from benchmarks.cells import ratio_cell
from benchmarks.fp8_fusion import Fp8FusionFigures, fp8_fusion_table, measure_shape
from benchmarks.machine import this_machine
from benchmarks.rows import Row, Subject
from graphopt.errors import DataError


def test_the_table_has_a_line_for_each_row():
    figures = Fp8FusionFigures("gelu", "one scale", 100, 300, 120, (0.2, 0.1), (0.05, 0.06), 0.0)
    table = fp8_fusion_table([Row(Subject("4x8", 0, "", ()), this_machine(), figures)])
    assert table.row_count == 1
    (ratio,) = [next(iter(column.cells)) for column in table.columns if column.header == "of unfused"]
    assert ratio == ratio_cell(0.05, 0.1)


@pytest.mark.parametrize("shape", ["4", "4xa", "4x8x2"])
def test_a_shape_that_is_none_is_named(shape):
    with pytest.raises(DataError, match=f"came '{shape}'"):
        next(measure_shape(shape, 1))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
def test_fused_codes_need_no_more_memory(monkeypatch):
    monkeypatch.setattr(fp8_fusion, "PRODUCERS", {"gelu": fp8_fusion.gelu})
    rows = list(measure_shape("256x512", 2))
    assert len(rows) == 2
    for figures in (row.figures for row in rows):
        assert figures.codes_bytes <= figures.fused_peak_bytes < figures.aten_peak_bytes
        assert figures.unequal == 0.0
