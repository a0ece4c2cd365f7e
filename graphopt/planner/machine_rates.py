"""The Rates of this machine: measured once by ``graphopt calibrate`` and kept in a file, else the default ones."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from graphopt.errors import DataError
from graphopt.planner.costs import DEFAULT_RATES, Rates

CACHE_VARIABLE = "GRAPHOPT_CACHE"
_FILE_NAME = "rates.json"
_ROUNDS = 9
_ROWS, _INNER, _COLUMNS = 2048, 512, 1376
_POINTWISE_ELEMENTS = 4 * 2**20
_CALLS = 200


def machine_rates() -> Rates:
    """The measured rates if there is a file of them, else the default ones, which are the same everywhere."""
    path = rates_file()
    return read_rates(path) if path.is_file() else DEFAULT_RATES


def rates_file() -> Path:
    """Where the rates of this machine are kept: in the folder GRAPHOPT_CACHE names, or the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "graphopt" / _FILE_NAME


def read_rates(path: Path) -> Rates:
    """The Rates in a file that ``graphopt calibrate`` wrote; DataError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers = {field.name: float(found[field.name]) for field in fields(Rates) if field.name != "name"}
        if not all(math.isfinite(number) and number > 0 for number in numbers.values()):
            raise ValueError("a rate is not a positive number")
        return Rates(**numbers, name=str(found["name"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not hold the rates of this machine ({error}): delete it, or run graphopt calibrate again"
        ) from error


def write_rates(rates: Rates) -> Path:
    """Keep ``rates`` for every later process of this user; returns the file."""
    return write_measured(rates_file(), asdict(rates))


def write_measured(path: Path, found: Mapping[str, Any]) -> Path:
    """Keep ``found`` in the file ``path``, whole or not at all; returns it. DataError where nothing can be written."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"what was measured is kept in {path}, which cannot be written ({error}): make it writable, or name "
            f"another folder in {CACHE_VARIABLE}"
        ) from error
    return path


def measure_rates() -> Rates:
    """The Rates of this machine, each the median of some rounds: a product of matrices, a sum of two tensors into fresh
    memory, a copy into memory that is there, and a call on one element."""
    left, right = torch.randn(_ROWS, _INNER), torch.randn(_INNER, _COLUMNS)
    values = torch.randn(_POINTWISE_ELEMENTS)
    target, one = torch.empty_like(values), torch.ones(1)

    def calls() -> None:
        for _ in range(_CALLS):
            torch.neg(one)

    with torch.no_grad():
        return Rates(
            flops=2 * _ROWS * _INNER * _COLUMNS / _median_seconds(lambda: left @ right),
            bytes=3 * values.nbytes / _median_seconds(lambda: values + values),
            host_bytes=values.nbytes / _median_seconds(lambda: target.copy_(values)),
            call_seconds=_median_seconds(calls) / _CALLS,
            name=f"measured with {torch.get_num_threads()} threads",
        )


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
