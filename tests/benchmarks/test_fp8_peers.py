"""FP8 training beside torchao's: the table, and what is measured of small blocks."""

from __future__ import annotations

import pytest

from benchmarks import fp8_peers
from benchmarks.cells import ratio_cell
from benchmarks.fp8_peers import measure_rows, ways
from benchmarks.fp8_peers_table import PeerFigures, peers_table
from benchmarks.machine import this_machine
from benchmarks.peers import EAGER, GRAPHOPT
from benchmarks.rows import Row, Subject


def test_the_table_compares_each_way_with_eager():
    figures = PeerFigures("a way", 150, 10, 200, 40, 20.0, "0.q.weight")
    table = peers_table([Row(Subject("blocks", 0, "", ()), this_machine(), figures)])
    (line,) = zip(*(column.cells for column in table.columns), strict=True)
    assert line[0] == "a way" and line[2] == ratio_cell(150, 200) and line[4] == ratio_cell(10, 40)


def test_torchao_is_left_out_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert all(name.startswith((EAGER, GRAPHOPT)) for name in ways())


@pytest.mark.slow
def test_a_block_in_fp8_adds_less_to_the_peak(monkeypatch):
    chosen = {name: make for name, make in ways().items() if name in (EAGER, f"{GRAPHOPT} rowwise")}
    monkeypatch.setattr(fp8_peers, "ways", lambda: chosen)
    eager, own = (row.figures for row in measure_rows(128, 512, 3))
    assert eager.way == EAGER and eager.block_bytes == eager.eager_block_bytes
    assert own.block_bytes < 0.6 * eager.block_bytes and own.peak_bytes < eager.peak_bytes
    assert own.decibels > 15
