"""The memory suite on tiny models: every prefix runs, and what was estimated is what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.memory import MemorySuite
from benchmarks.memory_settings import checkpoint_settings, memory_settings
from benchmarks.memory_table import LARGEST_ESTIMATE_ERROR, memory_table
from benchmarks.models import MODELS
from benchmarks.peers import EAGER, GRAPHOPT, TORCH_COMPILE
from benchmarks.prefixes import NO_PASS, STAGES, PassPrefix, pass_prefixes
from benchmarks.rows import MemoryFigures, Row, load_rows, store_rows
from benchmarks.steps import StepBench
from graphopt.pipeline.default import default_pipeline

# Every so many passes a prefix is measured, besides the whole pipeline; the slow tests measure all.
_STRIDE = 6


def few_prefixes() -> tuple[PassPrefix, ...]:
    """The shortest prefix, some, and the longest."""
    found = pass_prefixes()
    return (*found[:-1:_STRIDE], found[-1])


def measured_rows() -> tuple[Row[MemoryFigures], ...]:
    """The suite on the smallest model."""
    return tuple(MemorySuite(MODELS["tiny-mlp"], layers=1, rounds=1, compile_peer=False).measure())


@pytest.fixture(scope="module")
def rows() -> tuple[Row[MemoryFigures], ...]:
    """The suite with few prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.memory.pass_prefixes", few_prefixes)
        return measured_rows()


def test_prefixes_grow_by_one_pass_up_to_the_default_pipeline() -> None:
    prefixes = pass_prefixes()

    assert [sum(map(len, prefix.pipelines)) for prefix in prefixes] == list(range(len(prefixes)))
    assert prefixes[0].name == NO_PASS
    assert prefixes[-1].pipelines == tuple(default_pipeline(stage) for stage in STAGES)


def test_every_prefix_has_a_row(rows: tuple[Row[MemoryFigures], ...]) -> None:
    measured = [row.figures.name for row in rows if row.figures.kind == "pass"]

    assert measured == [prefix.name for prefix in few_prefixes()]
    assert [row.figures.name for row in rows if row.figures.kind == "peer"] == [EAGER, GRAPHOPT]


def assert_estimates_hold(rows: tuple[Row[MemoryFigures], ...]) -> None:
    for row in rows:
        if row.figures.name != EAGER:
            assert row.figures.estimate_error is not None
            assert row.figures.estimate_error <= LARGEST_ESTIMATE_ERROR, row.figures


def test_estimated_peak_of_a_prefix_is_the_measured_one(rows: tuple[Row[MemoryFigures], ...]) -> None:
    assert_estimates_hold(rows)


@pytest.mark.slow
def test_estimated_peak_of_every_prefix_is_the_measured_one() -> None:
    rows = measured_rows()

    assert [row.figures.name for row in rows if row.figures.kind == "pass"] == [
        prefix.name for prefix in pass_prefixes()
    ]
    assert_estimates_hold(rows)


def test_last_prefix_is_what_users_get(rows: tuple[Row[MemoryFigures], ...]) -> None:
    product = next(row.figures for row in rows if row.figures.name == GRAPHOPT)
    last = rows[-1].figures

    assert (last.estimated_peak_bytes, last.measured_peak_bytes, last.num_ops, last.resting_bytes) == (
        product.estimated_peak_bytes,
        product.measured_peak_bytes,
        product.num_ops,
        product.resting_bytes,
    )


def test_all_rest_with_the_same_state(rows: tuple[Row[MemoryFigures], ...]) -> None:
    assert len({row.figures.resting_bytes for row in rows}) == 1


@pytest.mark.parametrize(
    "name",
    [
        "tiny-resnet",
        "tiny-gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-llama", "tiny-bert", "tiny-vit")),
    ],
)
def test_estimate_holds_before_and_after_the_pipeline(name: str) -> None:
    model = MODELS[name]
    bench = StepBench(model.make_model(None), model.make_batch(), model.outputs, rounds=1)
    prefixes = pass_prefixes()

    errors = [bench.prefix(prefix).estimate_error for prefix in (prefixes[0], prefixes[-1])]

    assert all(error is not None and error <= LARGEST_ESTIMATE_ERROR for error in errors), errors


@pytest.mark.slow
def test_settings_have_rows_behind_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.memory.pass_prefixes", lambda: pass_prefixes()[-1:])
    settings = (*checkpoint_settings("every-1"), *memory_settings("0.9,1"))
    suite = MemorySuite(MODELS["tiny-mlp"], layers=6, rounds=1, compile_peer=False, settings=settings)

    measured = [row.figures for row in suite.measure()]

    policy, budget, impossible = measured[-3:]
    assert len(measured) == suite.num_rows
    assert [figures.name for figures in measured[-3:]] == ["EveryN(n=1)", "memory=0.9", "memory=1"]
    keep = next(figures for figures in measured if figures.name == GRAPHOPT)
    for figures in (policy, budget):
        assert figures.measured_peak_bytes is not None and keep.measured_peak_bytes is not None
        assert figures.measured_peak_bytes < keep.measured_peak_bytes
        assert figures.estimate_error is not None and figures.estimate_error <= LARGEST_ESTIMATE_ERROR
        assert figures.step_seconds is not None
    assert impossible.note.startswith("BudgetError") and impossible.measured_peak_bytes is None


def test_rows_come_back_as_they_were_stored(rows: tuple[Row[MemoryFigures], ...], tmp_path: Path) -> None:
    path = tmp_path / "new" / "memory-tiny-mlp.jsonl"

    stored = tuple(store_rows(path, rows))

    assert stored == rows == load_rows(path, MemoryFigures)


def test_failed_run_leaves_the_old_rows(rows: tuple[Row[MemoryFigures], ...], tmp_path: Path) -> None:
    def failing() -> Iterator[Row[MemoryFigures]]:
        yield rows[0]
        raise RuntimeError("out of memory")

    path = tmp_path / "memory-tiny-mlp.jsonl"
    list(store_rows(path, rows))

    with pytest.raises(RuntimeError, match="out of memory"):
        list(store_rows(path, failing()))

    assert load_rows(path, MemoryFigures) == rows
    assert list(tmp_path.iterdir()) == [path]


def test_table_marks_an_estimate_that_is_off(rows: tuple[Row[MemoryFigures], ...]) -> None:
    peak = rows[-1].figures.measured_peak_bytes
    assert peak is not None
    off = replace(rows[-1], figures=replace(rows[-1].figures, estimated_peak_bytes=round(1.02 * peak)))

    assert "1.0200 !" in _text(memory_table([off]))
    assert "!" not in _text(memory_table(rows))


def test_row_of_a_peer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["tiny-mlp"]
    bench = StepBench(model.make_model(None), model.make_batch(), model.outputs, rounds=1)
    monkeypatch.setattr("torch.compile", lambda module: _raise)

    peers = {figures.name: figures for figures in bench.peers(compile_peer=True)}

    assert peers[TORCH_COMPILE].note == "RuntimeError: no C++ compiler"
    assert peers[TORCH_COMPILE].step_seconds is None
    assert peers[GRAPHOPT].step_seconds is not None


def _raise(**batch: object) -> None:
    raise RuntimeError("no C++ compiler\nand a long traceback")


def _text(table: object) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
