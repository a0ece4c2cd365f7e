"""The scale of a tensor of which nothing is known, without a GPU: interpreted, and compiled for each target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from graphopt.kernels.fp8_first_scale_triton import (
    SIDE,
    WARPS,
    amax_unless_known_kernel,
    scale_unless_known_kernel,
)
from graphopt.kernels.launch_triton import options_for
from tests.support.kernel_targets import compiled_with

TARGETS = (80, 89, 90, 100)


def test_interpreted_kernels_give_the_bits_of_the_operator():
    """Triton decides when it is imported whether it interprets, so a process of its own runs the cases."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_first_scale"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 12 and [case for case, is_same in found.items() if not is_same] == []


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in TARGETS if arch != 90)])
def test_kernels_compile_without_spills(arch):
    signature = {name: "i32" for name in amax_unless_known_kernel.arg_names if not name.isupper()} | {
        "x_ptr": "*bf16",
        "known_ptr": "*fp32",
        "amax_ptr": "*i32",
    }
    constants = {"ROWS": SIDE, "COLUMNS": SIDE, "x_column_stride": 1}
    aligned = ("x_ptr", "num_rows", "num_columns", "x_row_stride")
    amax = compiled_with(
        amax_unless_known_kernel, signature, constants, options_for(WARPS), arch, multiples_of_16=aligned
    )
    pointers = {"known_ptr": "*fp32", "amax_ptr": "*i32", "scale_ptr": "*fp32", "room": "fp32"}
    constants = {"FORMAT": 0, "POWER_OF_TWO": True}
    scale = compiled_with(scale_unless_known_kernel, pointers, constants, options_for(1), arch)
    for compiled in (amax, scale):
        assert (compiled.stack_bytes, compiled.local_bytes) == (0, 0)
    # It is known before the tile is read, so a tile that is not needed is skipped.
    loads, branch = amax.ptx.index("ld.global"), amax.ptx.index("bra")
    assert loads < branch < amax.ptx.rindex("ld.global")
