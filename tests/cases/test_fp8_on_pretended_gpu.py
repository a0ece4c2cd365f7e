"""Whole FP8 steps take the way of a GPU: Triton kernels, interpreted, on tensors that say that they lie on "cuda"."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.support.pretended_gpu import build_library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA cannot pretend to have another"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
WINDOWS_OF_TWO = "windows of two"


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """By case and device; a process of its own runs them, since a pretended GPU stays."""
    folder = tmp_path_factory.mktemp("pretended")
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.steps_on_pretended_gpu"]
    done = subprocess.run(
        [*command, str(build_library(folder))],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "GRAPHOPT_CACHE": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_recipe_trains_as_on_the_cpu(steps):
    """Where this was written, to the last bit; another order of float32 sums may move a code."""
    assert len(steps) == 4
    for name, found in steps.items():
        finite = [loss for loss in found["gpu"]["losses"] if math.isfinite(loss)]
        assert len(finite) == len(found["gpu"]["losses"]) - 1, name
        assert found["gpu"]["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-4, nan_ok=True), name


def test_the_device_skips_what_is_not_finite(steps):
    assert {name: found["gpu"]["skipped"] for name, found in steps.items()} == dict.fromkeys(steps, 1)


def test_a_step_reads_nothing_from_the_device_but_what_became_of_the_update_before(steps):
    for name, found in steps.items():
        reads = found["gpu"]["reads"]
        assert reads[0] == 0, name
        assert (reads[1] == 0) == (WINDOWS_OF_TWO in name), "the first update is asked about by the call behind it"
