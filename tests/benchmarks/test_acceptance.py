"""What is read off a frontier: ratios in the same rounds, at peaks that really are no higher."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks.acceptance import Check, checks
from benchmarks.frontier_plot import frontier_plot
from benchmarks.frontier_rows import AT_PEAK, AT_SMALL_SHARE, KEEP, SMALLEST, FrontierFigures
from benchmarks.frontier_table import acceptance_table, frontier_table, summary_table
from benchmarks.machine import Machine
from benchmarks.memory_peers import GRADIENT_CHECKPOINTING
from benchmarks.peers import EAGER, GRAPHOPT, TORCH_COMPILE
from benchmarks.rows import Row, Subject

MIB = 2**20
MACHINE = Machine("a CPU", 2, 2, "2.13", "5.24", "3.12", "Linux 6", "0.1", "0123456789abcdef", False, "2025-12-01")


def point(name: str, mebibytes: int, seconds: float, **more: object) -> FrontierFigures:
    """A point in round numbers; eager takes 1 s."""
    figures = FrontierFigures(
        name,
        peak_bytes=mebibytes * MIB,
        predicted_peak_bytes=mebibytes * MIB,
        resting_bytes=1000 * MIB,
        first_step_seconds=10.0,
        own_seconds=(seconds, seconds, 9.0),
        eager_seconds=(1.0, 1.0, 9.0),
    )
    return replace(figures, **more)  # type: ignore[arg-type]


def beside(peer: str, setting: str, mebibytes: int, ratio: float, *, backend: str = "aten") -> FrontierFigures:
    """A point of ours in the rounds of ``peer``, which takes 2 s there."""
    seconds = 2.0 * ratio
    own = point(GRAPHOPT, mebibytes, seconds, backend=backend, setting=setting, beside=peer)
    return replace(own, beside_seconds=(2.0, 2.0, 9.0), first_step_seconds=6.0)


POINTS = (
    point(EAGER, 800, 1.0),
    point(GRAPHOPT, 700, 0.9, backend="aten", setting=KEEP),
    point(GRAPHOPT, 150, 1.5, backend="aten", setting=SMALLEST),
    point(GRADIENT_CHECKPOINTING, 400, 1.3),
    beside(GRADIENT_CHECKPOINTING, AT_PEAK, 400, 0.8),
    beside(GRADIENT_CHECKPOINTING, AT_SMALL_SHARE, 300, 1.1),
    beside(GRADIENT_CHECKPOINTING, "EveryN(n=1)", 380, 0.95),
    point(TORCH_COMPILE, 600, 0.7),
    beside(TORCH_COMPILE, AT_PEAK, 600, 0.99, backend="inductor"),
    beside(TORCH_COMPILE, AT_PEAK, 600, 1.4, backend="aten"),
)


def named(found: tuple[Check, ...]) -> dict[tuple[str, str], Check]:
    """The checks by whom and what."""
    return {(check.against, check.what): check for check in found}


def test_times_are_compared_at_the_peak_of_the_peer() -> None:
    found = named(checks("gpt2-124m", POINTS))

    at_peak = found[GRADIENT_CHECKPOINTING, "aten: step time at its peak"]
    assert (at_peak.figure, at_peak.bound, at_peak.is_met) == (pytest.approx(0.8), 0.9, True)
    small = found[GRADIENT_CHECKPOINTING, "aten: step time at 0.75 of its peak"]
    assert (small.figure, small.bound, small.is_met) == (pytest.approx(1.1), 1.0, False)


def test_peak_above_that_of_the_peer_is_no_comparison() -> None:
    higher = [replace(p, peak_bytes=410 * MIB) if p.setting == AT_PEAK else p for p in POINTS]

    check = named(checks("gpt2-124m", higher))[GRADIENT_CHECKPOINTING, "aten: step time at its peak"]

    assert (check.figure, check.is_met) == (None, False)
    assert check.note == "the peak is 1.02 of its peak"


def test_policies_are_compared_in_peak_and_time() -> None:
    found = named(checks("gpt2-124m", POINTS))

    assert found[GRADIENT_CHECKPOINTING, "aten: EveryN(n=1), peak"].figure == pytest.approx(0.95)
    assert found[GRADIENT_CHECKPOINTING, "aten: EveryN(n=1), step time"].figure == pytest.approx(0.95)


def test_torch_compile_is_compared_with_inductor_alone() -> None:
    found = [check for check in checks("gpt2-124m", POINTS) if check.against == TORCH_COMPILE]

    assert [(check.what, check.figure, check.is_met) for check in found] == [
        ("inductor: step time at its peak", pytest.approx(0.99), True),
        ("inductor: first step, compile included", pytest.approx(0.6), True),
    ]


def test_smallest_peak_is_compared_with_every_budget_of_torch_compile() -> None:
    found = named(checks("gpt2-124m", (*POINTS, point("torch.compile budget 0.2", 100, 2.0))))

    assert found["torch.compile, every budget", "aten: smallest peak over its smallest"].figure == pytest.approx(1.5)


def test_whole_step_is_asked_of_one_model() -> None:
    whole = [check for check in checks("llama-110m", POINTS) if "whole step" in check.what]

    assert [(check.figure, check.bound) for check in whole] == [(pytest.approx(1.15), 1.18)]
    assert len(checks("gpt2-124m", POINTS)) == len(checks("llama-110m", POINTS)) - 1


def test_worst_budget_of_a_backend_is_a_check() -> None:
    budgets = [
        point(GRAPHOPT, 100, 1.0, backend="aten", setting=name, budget_bytes=limit * MIB, input_bytes=1000 * MIB)
        for name, limit in (("budget 2 of 3", 1100), ("budget 3 of 3", 1000))
    ]

    found = named(checks("gpt2-124m", budgets))

    worst = found["its budget", "aten: whole step, the worst of 2"]
    assert (worst.figure, worst.is_met) == (pytest.approx(1.1), False)
    assert "budget 3 of 3" in worst.note


def test_failed_contender_is_never_met() -> None:
    failed = FrontierFigures(GRAPHOPT, "aten", AT_PEAK, GRADIENT_CHECKPOINTING, note="BudgetError: too small")
    points = [failed if p.key == failed.key else p for p in POINTS]

    check = named(checks("gpt2-124m", points))[GRADIENT_CHECKPOINTING, "aten: step time at its peak"]

    assert (check.figure, check.is_met, check.note) == (None, False, "BudgetError: too small")


def test_tables_show_ratios_of_the_same_rounds() -> None:
    rows = [Row(Subject("gpt2-124m", 124_000_000, "x f32[2]", ("loss",)), MACHINE, found) for found in POINTS]

    assert any("at its peak" in line and "1.60 s" in line and "0.80" in line for line in _lines(frontier_table(rows)))
    assert any("step time at its peak" in line and "yes" in line for line in _lines(acceptance_table([rows])))
    checkpointing, compiled = (line for line in _lines(summary_table([rows])) if "gpt2-124m" in line)
    assert "0.80 (aten)" in checkpointing and "1.10 (aten)" in checkpointing and "3 of 4" in checkpointing
    assert "0.99 (inductor)" in compiled and "2 of 2" in compiled and "150 MiB" in compiled


def test_plot_has_a_mark_for_every_point_and_a_line_for_every_backend() -> None:
    failed = FrontierFigures("torch.compile budget 0.2", note="no <compiler>")

    root = ElementTree.fromstring(frontier_plot("a < b", (*POINTS, failed)))

    tag = "{http://www.w3.org/2000/svg}"
    titles = [title.text or "" for title in root.iter(f"{tag}title")]
    assert len(titles) == len(POINTS)
    assert [line.get("class") for line in root.iter(f"{tag}polyline")] == ["aten", "inductor"]
    assert len([mark for mark in root.iter(f"{tag}rect") if mark.get("class") == "peer"]) == 3
    inside = [float(mark.get("cx", "0")) for mark in root.iter(f"{tag}circle")]
    assert all(0 <= x <= 860 for x in inside)


def test_plot_of_nothing_is_still_a_page() -> None:
    assert ElementTree.fromstring(frontier_plot("none", ())).tag.endswith("svg")


def _lines(table: object) -> list[str]:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()
