"""Another torch than those of the declared range is refused at import, by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphopt.torch_range import FIRST_UNKNOWN, OLDEST, refuse_other_torch

ROOT = Path(__file__).parents[1]


def test_the_range_is_the_declared_one():
    declared = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(int(part) for part in declared.groups()) == (*OLDEST, *FIRST_UNKNOWN)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.12.0a0+git0123456", torch.__version__])
def test_versions_inside_the_range_are_taken(version):
    refuse_other_torch(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.10.2+cu128", "2.15.0", "3.0.0"])
def test_versions_outside_the_range_are_refused(version):
    with pytest.raises(ImportError, match=r"torch>=2\.11,<2\.15.*found torch " + re.escape(version)):
        refuse_other_torch(version)


def test_importing_graphopt_refuses_another_torch_before_it_uses_any_of_it(tmp_path):
    (tmp_path / "torch.py").write_text('__version__ = "2.10.0"\n')
    found = subprocess.run(
        [sys.executable, "-c", "import graphopt"], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert found.returncode == 1
    assert "ImportError: graphopt needs torch>=2.11,<2.15" in found.stderr
    assert "pip install 'torch>=2.11,<2.15'" in found.stderr
