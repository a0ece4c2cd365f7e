"""Rates of a machine: default ones everywhere, measured ones from a file that is checked."""

from __future__ import annotations

import json

import pytest

from graphopt.cli import run
from graphopt.errors import DataError
from graphopt.planner.costs import DEFAULT_RATES
from graphopt.planner.machine_rates import CACHE_VARIABLE, machine_rates, rates_file, write_rates


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def test_without_a_file_the_rates_are_the_default_ones():
    assert machine_rates() == DEFAULT_RATES


def test_calibrate_writes_rates_that_later_plans_use(capsys):
    assert run(["calibrate"]) == 0
    found = machine_rates()
    assert found != DEFAULT_RATES and found.flops > 0 and found.bytes > 0
    assert str(rates_file()) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("content", ["", "{}", "[1]", json.dumps({"flops": 1.0}), "not json"])
def test_a_broken_file_is_an_error_that_says_what_to_do(content):
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(content)
    with pytest.raises(DataError, match="run graphopt calibrate again"):
        machine_rates()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_positive_number_is_refused(value):
    path = write_rates(DEFAULT_RATES)
    path.write_text(json.dumps({**json.loads(path.read_text()), "bytes": value}))
    with pytest.raises(DataError, match="not a positive number"):
        machine_rates()
