"""The smaller benchmarks: step time in rounds, and compile time by number of layers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.compile_time import growth, time_compile
from benchmarks.models import MODELS
from benchmarks.rows import CompileTimeFigures
from benchmarks.speed import Quartiles, measure_speed


def test_speed_row_holds_every_round() -> None:
    row = measure_speed(MODELS["tiny-mlp"], layers=1, rounds=2)

    assert row.subject.model == "tiny-mlp-layers1"
    assert len(row.figures.eager_seconds) == len(row.figures.graphopt_seconds) == len(row.figures.ratios) == 2


def test_quartiles_of_five_rounds() -> None:
    assert Quartiles.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Quartiles(2.0, 3.0, 4.0)
    assert Quartiles.of([7.0]) == Quartiles(7.0, 7.0, 7.0)


def test_compile_time_row_has_every_part() -> None:
    row = time_compile(MODELS["tiny-mlp"], 2)
    figures = row.figures

    assert figures.layers == 2
    assert min(figures.capture_seconds, figures.differentiate_seconds, figures.pass_seconds, figures.emit_seconds) > 0


def test_growth_is_one_when_seconds_follow_layers() -> None:
    first = CompileTimeFigures(12, 100, 1.0, 1.0, 1.0, 1.0, 1.0)

    assert growth(replace(first, layers=24), first) == 0.5
    assert growth(CompileTimeFigures(24, 200, 2.0, 2.0, 2.0, 2.0, 2.0), first) == 1.0
