"""The frontier on small models: every contender has a row, budgets hold, a cut run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import typer
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from benchmarks.frontier import FrontierRow, chosen_backends, keep_rows, main, old_rows, partial_path
from benchmarks.frontier_bench import FrontierBench, FrontierPlan, num_rows
from benchmarks.frontier_rows import AT_PEAK, AT_SMALL_SHARE, KEEP, SMALL_SHARE, SMALLEST, FrontierFigures
from benchmarks.machine import Machine
from benchmarks.measure import measure_step
from benchmarks.memory_peers import (
    GRADIENT_CHECKPOINTING,
    budgeted_compile_contender,
    gradient_checkpointing_contender,
)
from benchmarks.memory_settings import checkpoint_settings
from benchmarks.memory_table import LARGEST_ESTIMATE_ERROR
from benchmarks.models import MODELS, Perceptron
from benchmarks.peers import EAGER, GRAPHOPT, eager_contender
from benchmarks.rows import Row, Subject, load_rows
from graphopt.errors import DataError, UnsupportedError

MACHINE = Machine("a CPU", 2, 2, "2.13", "5.24", "3.12", "Linux 6", "0.1", "0123456789abcdef", False, "2025-12-01")
SUBJECT = Subject("tiny-mlp", 1000, "x f32[2]", ("loss",))
ROUNDS = 2
BROKEN = "torch.compile"


class CheckpointedPerceptron(Perceptron):
    """With the switch that transformers' models have."""

    is_checkpointed = False

    def activation_checkpointing_enable(self) -> None:
        """Checkpoint every layer."""
        self.is_checkpointed = True

    def activation_checkpointing_disable(self) -> None:
        """Keep everything."""
        self.is_checkpointed = False

    def disable_input_require_grads(self) -> None:
        """There is nothing to undo."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """As the Perceptron."""
        if not self.is_checkpointed:
            return super().forward(input_ids, labels)
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = checkpoint(lambda x, layer=layer: nn.functional.gelu(layer(x)), hidden, use_reentrant=False)
        logits = self.head(hidden.mean(dim=1))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def _broken(model: nn.Module, batch: Any) -> Any:
    raise RuntimeError("no C++ compiler\nand a long traceback")


PLAN = FrontierPlan(
    outputs=("loss",),
    backends=("aten",),
    peers={GRADIENT_CHECKPOINTING: gradient_checkpointing_contender, BROKEN: _broken},
    policies=checkpoint_settings("every-1"),
    points=2,
    rounds=ROUNDS,
)


def bench(done: dict[Any, FrontierFigures] | None = None) -> FrontierBench:
    """Twelve layers on a batch of tokens."""
    return FrontierBench(CheckpointedPerceptron(12), MODELS["tiny-mlp"].make_batch(), PLAN, done)


@pytest.fixture(scope="module")
def points() -> tuple[FrontierFigures, ...]:
    """One whole run."""
    return tuple(bench().measure())


@pytest.mark.slow
def test_every_contender_has_a_row(points: tuple[FrontierFigures, ...]) -> None:
    assert [(point.name, point.setting, point.beside) for point in points] == [
        (EAGER, "", ""),
        (GRAPHOPT, KEEP, ""),
        (GRAPHOPT, SMALLEST, ""),
        (GRAPHOPT, "budget 2 of 2", ""),
        (GRADIENT_CHECKPOINTING, "", ""),
        (GRAPHOPT, AT_PEAK, GRADIENT_CHECKPOINTING),
        (GRAPHOPT, AT_SMALL_SHARE, GRADIENT_CHECKPOINTING),
        (GRAPHOPT, "EveryN(n=1)", GRADIENT_CHECKPOINTING),
        (BROKEN, "", ""),
    ]
    assert len(points) == num_rows(PLAN) - 1  # nothing is run at the peak of a peer that failed


@pytest.mark.slow
def test_predicted_peaks_are_the_measured_ones_and_hold_their_budgets(points: tuple[FrontierFigures, ...]) -> None:
    own = [point for point in points if point.is_own and not point.note]

    assert len(own) >= 5
    for point in own:
        assert point.estimate_error is not None and point.estimate_error <= LARGEST_ESTIMATE_ERROR, point
        if point.budget_bytes is not None:
            assert point.predicted_peak_bytes is not None and point.input_bytes is not None
            assert point.predicted_peak_bytes + point.input_bytes <= point.budget_bytes


@pytest.mark.slow
def test_smaller_budgets_have_smaller_peaks(points: tuple[FrontierFigures, ...]) -> None:
    peaks = {point.setting: point.peak_bytes or 0 for point in points if point.is_own and not point.beside}

    assert peaks[SMALLEST] < peaks["budget 2 of 2"] <= peaks[KEEP]


@pytest.mark.slow
def test_budget_of_a_comparison_is_the_peak_of_the_peer(points: tuple[FrontierFigures, ...]) -> None:
    peer = next(point for point in points if point.name == GRADIENT_CHECKPOINTING)
    keep = next(point for point in points if point.setting == KEEP)
    budgets = {point.setting: point.budget_bytes for point in points if point.beside}

    assert peer.peak_bytes is not None and keep.input_bytes is not None
    assert budgets[AT_PEAK] == keep.input_bytes + peer.peak_bytes
    assert budgets[AT_SMALL_SHARE] == keep.input_bytes + round(SMALL_SHARE * peer.peak_bytes)


@pytest.mark.slow
def test_seconds_are_of_the_same_rounds(points: tuple[FrontierFigures, ...]) -> None:
    for point in points:
        if point.note:
            assert point.own_seconds == point.eager_seconds == point.beside_seconds == ()
        else:
            assert len(point.own_seconds) == len(point.eager_seconds) == ROUNDS
            assert len(point.beside_seconds) == (ROUNDS if point.beside else 0)


@pytest.mark.slow
def test_failure_is_the_note_of_its_row(points: tuple[FrontierFigures, ...]) -> None:
    assert points[-1].note == "RuntimeError: no C++ compiler"
    assert points[-1].peak_bytes is None


@pytest.mark.slow
def test_run_that_was_cut_measures_only_what_is_missing(points: tuple[FrontierFigures, ...]) -> None:
    missing = next(point for point in points if point.setting == AT_PEAK)
    done = {point.key: point for point in points if point is not missing}

    again = tuple(bench(done).measure())

    assert [point.key for point in again] == [point.key for point in points]
    assert [new is old for new, old in zip(again, points, strict=True)].count(False) == 1
    measured = next(point for point in again if point.setting == AT_PEAK)
    assert (measured.peak_bytes, measured.budget_bytes) == (missing.peak_bytes, missing.budget_bytes)
    assert len(measured.beside_seconds) == ROUNDS


@pytest.mark.slow
def test_cut_run_leaves_whole_rows_that_succeeded(points: tuple[FrontierFigures, ...], tmp_path: Path) -> None:
    path = tmp_path / "frontier-tiny-mlp.jsonl"
    rows = [Row(SUBJECT, MACHINE, point) for point in points]

    def cut() -> Iterator[FrontierRow]:
        yield rows[0]
        yield rows[-1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(keep_rows(path, cut()))
    with partial_path(path).open("a") as stream:
        stream.write('{"subject": {"mod')

    assert not path.exists()
    assert old_rows(path, rounds=ROUNDS) == (rows[0],)
    assert old_rows(path, rounds=ROUNDS + 1) == ()


@pytest.mark.slow
def test_run_that_goes_on_loses_no_row(points: tuple[FrontierFigures, ...], tmp_path: Path) -> None:
    path = tmp_path / "frontier-tiny-mlp.jsonl"
    rows = tuple(Row(SUBJECT, MACHINE, point) for point in points)
    succeeded = tuple(row for row in rows if not row.figures.note)

    def cut() -> Iterator[FrontierRow]:
        yield rows[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(keep_rows(path, cut(), succeeded))

    assert old_rows(path, rounds=ROUNDS) == succeeded
    assert tuple(keep_rows(path, iter(rows), succeeded)) == load_rows(path, FrontierFigures) == rows
    assert not partial_path(path).exists()
    assert old_rows(path, rounds=ROUNDS) == succeeded


def test_transformers_checkpointing_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["tiny-llama"].make_model(4), MODELS["tiny-llama"].make_batch()

    kept = measure_step(eager_contender(model, batch), model, batch)
    checkpointed = measure_step(gradient_checkpointing_contender(model, batch), model, batch)

    assert checkpointed.peak_bytes < kept.peak_bytes
    assert checkpointed.resting_bytes == kept.resting_bytes
    assert not model.is_gradient_checkpointing
    assert not any(module._forward_hooks for module in model.modules())


def test_model_without_checkpointing_says_so() -> None:
    with pytest.raises(UnsupportedError, match="Perceptron has no gradient checkpointing"):
        gradient_checkpointing_contender(Perceptron(1), MODELS["tiny-mlp"].make_batch())


def test_budget_of_torch_compile_holds_during_its_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def compiled(model: nn.Module) -> Any:
        def forward(**batch: torch.Tensor) -> Any:
            budgets.append(torch._functorch.config.activation_memory_budget)
            return model(**batch)

        return forward

    monkeypatch.setattr("torch.compile", compiled)
    before = torch._functorch.config.activation_memory_budget

    budgeted_compile_contender(Perceptron(1), MODELS["tiny-mlp"].make_batch(), 0.25).step()

    assert (budgets, torch._functorch.config.activation_memory_budget) == ([0.25], before)


@pytest.mark.slow
def test_command_writes_rows_and_plot(tmp_path: Path) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(main)
    options = ["--layers", "2", "--backend", "aten", "--peers", "checkpointing", "--points", "1", "--rounds", "1"]

    done = CliRunner().invoke(app, ["--model", "tiny-mlp", *options, "--results", str(tmp_path)])

    assert done.exit_code == 0, done.output
    rows = load_rows(tmp_path / "frontier-tiny-mlp-layers2.jsonl", FrontierFigures)
    assert [row.figures.setting for row in rows if row.figures.is_own] == [KEEP, SMALLEST, *("EveryN(n=1)", "SqrtN()")]
    assert (tmp_path / "frontier-tiny-mlp-layers2.svg").read_text().startswith("<svg ")


def test_refuses_another_backend() -> None:
    assert chosen_backends("inductor, aten") == ("inductor", "aten")
    with pytest.raises(DataError, match="--backend expects"):
        chosen_backends("aten,tpu")
