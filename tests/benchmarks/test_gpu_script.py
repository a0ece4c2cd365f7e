"""The script for a GPU: it goes on after a part that fails, and reports it; its parts run at tiny sizes on the CPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.command import quiet_transformers
from benchmarks.fp8_step import TINY, Fp8StepFigures, measure_steps, step_table
from benchmarks.machine import this_machine
from benchmarks.rows import load_rows
from benchmarks.update_traffic import OWN, TINY_SHAPE, TrafficFigures, measure_traffic, traffic_bytes, traffic_table
from graphopt.errors import DataError, UnsupportedError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Answers as python does for the script: parts of the update fail, all others are well.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *is_available*) echo False ;;
  *fp8_matmul*) exit 3 ;;
  *update_traffic*) sleep 60 ;;
  *) echo "ran $*" ;;
esac
"""


def run_script(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh"],
        env=os.environ | {"RESULTS": str(folder), "SKIP_INSTALL": "1"} | environment,
        capture_output=True,
        text=True,
    )


def fake_python(folder: Path) -> str:
    path = folder / "python"
    path.write_text(FAKE_PYTHON)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_part_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    # The sleeping part gets what is left of the limit; after it nothing is begun.
    done = run_script(tmp_path, PYTHON=fake_python(tmp_path), LIMIT="3", MIN_SECONDS="1")
    assert done.returncode == 1
    assert "ran -W ignore -m benchmarks.kernel_checks --results" in done.stdout
    assert "FP8 products: FAILED (status 3)" in done.stdout
    assert "block-INT8 update: FAILED (status 124)" in done.stdout and "stopped after" in done.stdout
    assert "step in bf16: not run, the time is over" in done.stdout
    assert "no GPU row exists" in done.stdout


def test_a_step_is_measured_beside_its_plan() -> None:
    (row,) = measure_steps(replace(TINY, num_hidden_layers=1, length=16), ["tensorwise"], 1, CPU)
    figures = row.figures
    assert figures.note == "" and 0 < figures.num_fp8_products < figures.num_products
    assert figures.predicted_peak_bytes == pytest.approx(figures.measured_peak_bytes, rel=0.01)
    assert len(figures.seconds) == 1 and step_table([row]).row_count == 1


def test_a_precision_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Fp8StepFigures:
        raise DataError("out of memory")

    monkeypatch.setattr("benchmarks.fp8_step._measured", fails)
    (row,) = measure_steps(TINY, ["bf16"], 1, CPU)
    assert row.figures.note == "DataError: out of memory"


def test_only_the_steps_need_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails
    quiet_transformers()
    assert this_machine().torch == torch.__version__
    with pytest.raises(UnsupportedError, match="install it"):
        next(measure_steps(TINY, ["bf16"], 1, CPU))


def test_updates_are_held_against_the_bytes_that_must_move() -> None:
    # Two reads and a write of 4 bytes; two codes and two scales of 4 bytes for 256, read and written.
    assert traffic_bytes((1, 1, 256), torch.float32, 2 * (1 + 4 / 256)) == 256 * (12 + 4) + 16
    rows = tuple(measure_traffic(TINY_SHAPE, 2, CPU, 2**12))
    own = [row.figures for row in rows if row.figures.name == OWN]
    assert [figures.dtype for figures in own] == ["float32", "bfloat16"]
    assert all(len(figures.seconds) == 2 and figures.floor_seconds > 0 for figures in own)
    assert traffic_table(rows).row_count == len(rows) == 6


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the script is run by itself")
def test_the_script_ends_on_a_cpu(tmp_path: Path) -> None:
    done = run_script(tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU row exists" in done.stdout
    steps = [row for path in tmp_path.glob("fp8-step-*.jsonl") for row in load_rows(path, Fp8StepFigures)]
    assert {row.figures.precision for row in steps} == {"bf16", "tensorwise", "rowwise"}
    assert load_rows(tmp_path / "update-traffic-cpu.jsonl", TrafficFigures)
