"""The benchmark of updates: every way has a row, updates what it is given, and its bytes are those of its tensors."""

from __future__ import annotations

import pytest
import torch

from benchmarks.eight_bit_peers import NOT_INSTALLED
from benchmarks.update import UpdateShape, measure_update
from benchmarks.update_contenders import (
    FUSED,
    LOOP,
    OWN_BFLOAT16,
    OWN_COMPILED,
    OWN_FLOAT32,
    OWN_LARGE_BLOCK,
    OWN_OPERATOR,
    TORCHAO_8BIT,
    update_makers,
)
from benchmarks.update_table import UpdateFigures, update_checks, update_table
from graphopt.errors import DataError

WITHOUT_PACKAGES = (FUSED, LOOP, OWN_OPERATOR, OWN_LARGE_BLOCK, OWN_COMPILED, OWN_BFLOAT16, OWN_FLOAT32)
SHAPE = UpdateShape(2, 64, 128)


@pytest.fixture(scope="module")
def figures() -> dict[str, UpdateFigures]:
    """Two rounds of two tensors."""
    makers = {name: make for name, make in update_makers().items() if name in WITHOUT_PACKAGES}
    rows = tuple(measure_update("2x64x128", 2, makers))
    assert update_table(rows).row_count == len(rows)
    return {row.figures.name: row.figures for row in rows}


def test_every_way_is_timed_in_every_round(figures: dict[str, UpdateFigures]) -> None:
    assert tuple(figures) == WITHOUT_PACKAGES
    assert all(found.note == "" and len(found.seconds) == 2 for found in figures.values())


def test_bytes_are_those_of_the_state(figures: dict[str, UpdateFigures]) -> None:
    step_counts = 4 * SHAPE.count / SHAPE.numel
    assert figures[FUSED].state_bytes == pytest.approx(8 + step_counts)
    assert figures[OWN_OPERATOR].state_bytes == 2 + 2 * 4 / 256
    assert figures[OWN_LARGE_BLOCK].state_bytes == 2 + 2 * 4 / 2048
    assert figures[OWN_COMPILED].state_bytes == pytest.approx(2 + 2 * 4 / 256 + step_counts)
    assert figures[OWN_BFLOAT16].state_bytes == pytest.approx(4 + step_counts)


def test_checks_hold_the_bytes_to_their_bounds(figures: dict[str, UpdateFigures]) -> None:
    found = [check for check in update_checks(list(figures.values())) if check.against == "state"]
    assert len(found) == 3 and all(check.is_met for check in found)


@pytest.mark.parametrize(
    "name",
    [
        *WITHOUT_PACKAGES[:-2],
        *(pytest.param(name, marks=pytest.mark.slow) for name in WITHOUT_PACKAGES[-2:]),  # compiled like the one before
    ],
)
def test_an_update_is_that_of_adamw(name: str) -> None:
    """From zero state the first step of all is lr in the direction of the gradient, whatever keeps the moments."""
    parameters, gradients = SHAPE.tensors(0.02, seed=0), SHAPE.tensors(0.001, seed=1)
    trained = [parameter.clone() for parameter in parameters]
    update = update_makers()[name](trained, gradients)
    update.prepare()
    update.run()
    for before, after, gradient in zip(parameters, trained, gradients, strict=True):
        expected = before * (1 - 1e-3 * 1e-2) - 1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)


def test_a_missing_package_is_the_note_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (row,) = measure_update("1x16x16", 1, {TORCHAO_8BIT: update_makers()[TORCHAO_8BIT]})
    assert NOT_INSTALLED in row.figures.note and row.figures.seconds == ()


def test_a_shape_that_is_none_is_named() -> None:
    with pytest.raises(DataError, match="tensors x rows x columns"):
        list(measure_update("64x256", 1))
