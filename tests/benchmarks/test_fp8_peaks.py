"""Peaks of a step in bf16 and in FP8, measured on a small one."""

from __future__ import annotations

import pytest

from benchmarks.cells import ratio_cell
from benchmarks.fp8_peaks import chosen_tokens, measure, precisions
from benchmarks.fp8_peaks_table import PeakFigures, peaks_table
from benchmarks.machine import this_machine
from benchmarks.rows import Row, Subject
from graphopt.errors import DataError


def test_every_line_is_beside_bf16_at_its_number_of_tokens():
    figures = [PeakFigures("bf16", 8, 100, 80), PeakFigures("rowwise", 8, 50, 60), PeakFigures("bf16", 2, 10, 10)]
    table = peaks_table([Row(Subject("blocks", 0, "", ()), this_machine(), each) for each in figures])
    lines = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [(line[0], line[3], line[5]) for line in lines] == [
        ("8", ratio_cell(1, 1), ratio_cell(1, 1)),
        ("8", ratio_cell(50, 100), ratio_cell(60, 80)),
        ("2", ratio_cell(1, 1), ratio_cell(1, 1)),
    ]


def test_fp8_plans_less_where_activations_make_the_peak():
    found = {name: measure(16, 1024, name, precisions()[name]) for name in ("bf16", "rowwise")}
    assert found["rowwise"].planned_bytes < 0.8 * found["bf16"].planned_bytes
    assert all(each.planned_bytes <= each.measured_bytes for each in found.values())


@pytest.mark.parametrize("text", ["", "a", "16,0"])
def test_tokens_that_are_none_are_refused(text: str):
    with pytest.raises(DataError, match="expects numbers with commas"):
        chosen_tokens(text)
