"""The benchmark of the fused loss: every way is measured, and all agree."""

from __future__ import annotations

import pytest

from benchmarks.linear_loss import APART, TOGETHER, UNFUSED, linear_loss_table, measure_shape
from graphopt.errors import DataError


def test_every_way_has_a_row_and_the_same_result() -> None:
    rows = list(measure_shape("140x8x300", 2))

    names = [row.figures.name for row in rows]
    assert names[0] == UNFUSED and any(name.startswith(TOGETHER) for name in names) and names[-1].startswith(APART)
    assert all(row.figures.relative_error < 1e-5 and len(row.figures.seconds) == 2 for row in rows)
    assert linear_loss_table(rows).row_count == len(rows)


def test_a_shape_that_is_none_is_named() -> None:
    with pytest.raises(DataError, match="rows x features x classes"):
        list(measure_shape("140x8", 1))
