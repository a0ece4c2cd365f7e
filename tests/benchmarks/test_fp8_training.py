"""Training with FP8 recipes: rows that are kept, and how recipes are judged beside bf16."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.fp8_training import (
    PRECISIONS,
    TrainingSetting,
    chosen_recipes,
    chosen_seeds,
    measure_training,
    stored_rows,
    train,
)
from benchmarks.fp8_training_table import (
    BFLOAT16,
    Comparison,
    Fp8TrainingFigures,
    training_checks,
    training_table,
)
from graphopt.errors import DataError
from graphopt.train.byte_gpt import ByteGPTConfig
from graphopt.train.text_data import WindowShape, load_text, split_text

TINY = TrainingSetting(model=ByteGPTConfig(width=32, num_layers=1, num_heads=2, max_length=16), batch_size=2, steps=10)


def figures(recipe, seed, loss, *, fp8=3):
    return Fp8TrainingFigures(recipe, seed, 10, (9.0, loss), fp8 if recipe != BFLOAT16 else 0, 4, 0, 1.0)


def test_a_run_that_is_there_is_not_trained_again(tmp_path, monkeypatch):
    path, trained = tmp_path / "rows.jsonl", []

    def counted(setting, recipe, seed, data):
        trained.append((recipe, seed))
        return figures(recipe, seed, 2.0)

    monkeypatch.setattr("benchmarks.fp8_training.train", counted)
    tuple(measure_training(TINY, ["rowwise"], [1], load_text(None), path))
    rows = tuple(measure_training(TINY, [BFLOAT16, "rowwise"], [0, 1], load_text(None), path))
    assert trained == [("rowwise", 1), (BFLOAT16, 0), ("rowwise", 0), (BFLOAT16, 1)]
    # By seed and recipe, whatever the order in which they were measured.
    assert stored_rows(path, TINY.subject, TINY.steps) == rows


def test_rows_of_another_length_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr("benchmarks.fp8_training.train", lambda setting, recipe, seed, data: figures(recipe, seed, 2.0))
    tuple(measure_training(TINY, ["rowwise"], [0], load_text(None), path))
    with pytest.raises(DataError, match="another number of steps"):
        stored_rows(path, TINY.subject, 20)


def test_a_recipe_trains_products_in_fp8():
    data = split_text(load_text(None), WindowShape(TINY.batch_size, TINY.model.max_length))
    run = train(TINY, "rowwise", 0, data)
    assert 0 < run.num_fp8_products < run.num_products and run.skipped_updates == 0
    assert len(run.losses) == 10 and run.final_loss < run.losses[0]


def test_recipes_are_compared_by_seed():
    runs = [figures(BFLOAT16, 0, 2.0), figures(BFLOAT16, 1, 4.0), figures("rowwise", 1, 5.0)]
    comparison = Comparison.of(runs, "rowwise")
    assert comparison.ratio == comparison.worst_ratio == 1.25


def test_checks_see_a_loss_beyond_a_hundredth_and_a_run_without_fp8():
    base = [figures(BFLOAT16, seed, 2.0) for seed in (0, 1)]
    good = [figures("rowwise", 0, 2.03), figures("rowwise", 1, 2.0)]
    bad = [figures("blockwise", 0, 2.03), figures("blockwise", 1, 2.02)]
    idle = [figures("tensorwise", 0, 2.0, fp8=0)]
    alone = [figures("delayed", 7, 2.0)]
    checks = training_checks([*base, *good, *bad, *idle, *alone])
    assert [check.is_met for check in checks] == [True, False, False, False]
    assert [check.note for check in checks[2:]] == ["no product ran in FP8", "no run of bf16 with the same seed"]


def test_names_that_are_no_recipes_and_seeds_that_are_no_numbers_are_refused():
    assert chosen_recipes("bf16, rowwise") == ("bf16", "rowwise") and chosen_seeds("0, 3") == (0, 3)
    with pytest.raises(DataError, match="expects some of bf16, tensorwise"):
        chosen_recipes("fp4")
    with pytest.raises(DataError, match="numbers with commas"):
        chosen_seeds("one")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # fifteen runs
def test_every_recipe_ends_within_a_hundredth_of_bf16(tmp_path):
    """A shorter version of the benchmark, which runs 1,000 steps."""
    setting = dataclasses.replace(TrainingSetting(), steps=300)
    rows = tuple(measure_training(setting, list(PRECISIONS), [0, 1, 2], load_text(None), tmp_path / "rows.jsonl"))
    runs = [row.figures for row in rows]
    assert training_table(rows).row_count == len(PRECISIONS)
    assert all(run.final_loss < run.losses[0] - 0.3 for run in runs)  # it has learnt
    assert all(check.is_met for check in training_checks(runs)), training_checks(runs)
