"""Anchors of a small Llama: what is counted, and when an anchor is met."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from benchmarks.facts_llama import (
    ANCHORS,
    MODEL,
    FactsFigures,
    facts_table,
    measure_anchor,
    missed_lines,
    smallest_budget,
)
from benchmarks.models import MODELS, Perceptron

LAYERS, WIDTH, TOKENS, BATCH, CLASSES = 4, 64, 4 * 32, 4, 8
# Two operations a product and a sum; the layers see every token, the head one row of each.
FORWARD_FLOPS = 2 * (LAYERS * TOKENS * WIDTH * WIDTH + BATCH * WIDTH * CLASSES)
ROOMY_BYTES = 2**40


def measured(budget_bytes: int) -> FactsFigures:
    """The figures of a perceptron under ``budget_bytes``."""
    start = FactsFigures(LAYERS, "none", budget_bytes, 0.0)
    return measure_anchor(Perceptron(LAYERS), MODELS["tiny-mlp"].make_batch(), start, budget_bytes=budget_bytes)


def test_without_pressure_nothing_runs_again() -> None:
    found = measured(ROOMY_BYTES)

    assert (found.forward_flops, found.recomputed_flops, found.num_recomputed) == (FORWARD_FLOPS, 0, 0)
    assert found.is_met


def test_peak_includes_parameters_gradients_and_batch() -> None:
    parameters = sum(parameter.nbytes for parameter in Perceptron(LAYERS).parameters())

    found = measured(ROOMY_BYTES)

    assert found.peak_bytes is not None and found.peak_bytes > 2 * parameters
    assert found.peak_with_workspace_bytes is not None and found.peak_with_workspace_bytes >= found.peak_bytes


def test_smallest_budget_is_met_by_running_again() -> None:
    budget = smallest_budget(Perceptron(LAYERS), MODELS["tiny-mlp"].make_batch())

    found, roomy = measured(budget), measured(ROOMY_BYTES)

    assert found.peak_with_workspace_bytes is not None and found.peak_with_workspace_bytes <= budget
    assert found.peak_bytes is not None and roomy.peak_bytes is not None and found.peak_bytes < roomy.peak_bytes
    assert found.num_recomputed is not None and found.num_recomputed > 0
    assert measured(budget - 1).note == f"the smallest feasible budget is {budget} bytes"


@pytest.mark.parametrize(
    ("peak", "flops", "share", "met"),
    [
        (90, 0, 0.0, True),
        (90, 1, 0.0, False),
        (101, 0, 0.0, False),
        (100, 49, 0.5, True),
        (100, 50, 0.5, False),
        (99, 500, None, True),
        (100, 0, None, False),
        (None, None, 0.5, False),
    ],
)
def test_anchor_is_met_by_no_higher_peak_and_less_work(
    peak: int | None, flops: int | None, share: float | None, met: bool
) -> None:
    found = FactsFigures(8, "first 6", 100, share, peak_bytes=peak, recomputed_flops=flops, forward_flops=100)

    assert found.is_met is met


def test_missed_anchor_names_what_holds_the_peak() -> None:
    missed = FactsFigures(8, "first 6", 100, 0.5, 101, 101, 3, 9, 10, peak_at="mm_7", holders=("gelu (1.00 MiB)",))
    met = FactsFigures(8, "first 5", 200, 0.5, 101, 101, 3, 1, 10, peak_at="mm_8", holders=("gelu (1.00 MiB)",))

    assert missed_lines([missed, met]) == ["8 layers, first 6: the peak is at mm_7, where gelu (1.00 MiB) live"]
    console = Console(width=300)
    with console.capture() as captured:
        console.print(facts_table([missed, met]))
    assert "90.0 %" in captured.get() and "10.0 %" in captured.get()


@pytest.mark.parametrize(("layers", "megabytes"), [(8, 8.92), (24, 25.72)])
def test_model_has_the_size_that_the_anchors_were_computed_for(layers: int, megabytes: float) -> None:
    with torch.device("meta"):
        model = MODELS[MODEL].make_model(layers)

    assert round(sum(parameter.nbytes for parameter in model.parameters()) / 1e6, 2) == megabytes
    assert layers in ANCHORS
