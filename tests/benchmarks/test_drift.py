"""Training with small optimizer state: what drifts, and how that is judged."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.drift import (
    BFLOAT16,
    COMPANDED,
    DYNAMIC,
    FLOAT32,
    Drift,
    DriftFigures,
    DriftRecipe,
    drift_checks,
    drift_table,
    measure_drift,
    train,
)
from graphopt.train.byte_gpt import ByteGPTConfig
from graphopt.train.text_data import WindowShape, load_text, split_text

TINY = DriftRecipe(model=ByteGPTConfig(width=32, num_layers=1, num_heads=2, max_length=16), batch_size=2, steps=10)


def test_runs_of_one_seed_start_alike_and_differ_by_their_state() -> None:
    data = split_text(load_text(None), WindowShape(TINY.batch_size, TINY.model.max_length))
    wide, narrow = (train(TINY, state, 0, data) for state in (FLOAT32, COMPANDED))
    # The first step of Adam is the same whatever keeps its moments.
    assert wide.losses[0] == pytest.approx(narrow.losses[0], abs=1e-5) and wide.losses[1:] != narrow.losses[1:]
    assert wide.state_bytes == 8 and narrow.state_bytes < 4
    assert len(wide.losses) == 10 and wide.final_loss < wide.losses[0]


def finals(**losses: tuple[float, ...]) -> list[DriftFigures]:
    names = {"wide": FLOAT32, "half": BFLOAT16, "own": COMPANDED, "tree": DYNAMIC}
    return [
        DriftFigures(names[name], seed, 10, (9.0, loss), 2.0, 1.0)
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]


def test_gaps_are_between_runs_of_one_seed() -> None:
    drift = Drift(finals(wide=(2.0, 3.0), own=(2.25, 3.75)))
    assert drift.gaps(COMPANDED) == (0.25, 0.75) and drift.spread == 1.0


def test_checks_see_a_loss_beyond_the_spread_and_one_worse_than_the_dynamic_map() -> None:
    good = drift_checks(finals(wide=(2.0, 3.0), own=(2.1, 3.0), tree=(2.1, 3.1)))
    bad = drift_checks(finals(wide=(2.0, 3.0), own=(3.1, 4.2), tree=(2.1, 3.1)))
    assert [check.is_met for check in good] == [True, True]
    assert [check.is_met for check in bad] == [False, False]


@pytest.mark.slow
def test_training_with_8_bit_state_ends_where_float32_ends() -> None:
    """A shorter version of the benchmark, which runs 1,000 steps with three seeds."""
    recipe = dataclasses.replace(DriftRecipe(), steps=300)
    rows = tuple(measure_drift(recipe, range(3), load_text(None)))
    drift = Drift([row.figures for row in rows])
    assert drift_table(rows).row_count == 4
    assert all(figures.final_loss < figures.losses[0] - 0.5 for figures in drift.figures)  # it has learnt
    assert all(check.is_met for check in drift_checks(drift.figures)), drift_checks(drift.figures)
