"""The wheel holds the package and nothing beside it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_holds_only_graphopt(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"graphopt", wheel.name.rsplit("-py3", 1)[0] + ".dist-info"}
    kernels = ("graphopt/kernels/__init__.py", "graphopt/kernels/cpu_source/maps.h")
    for needed in ("graphopt/py.typed", "graphopt/passes/drop_dead.py", *kernels):
        assert needed in names
