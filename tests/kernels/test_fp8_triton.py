"""The Triton kernels of FP8 casts without a GPU: interpreted against the reference, and compiled for each target."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from graphopt.kernels.fp8_bits_triton import FORMATS
from graphopt.kernels.fp8_cast_triton import amax_kernel, cast_kernel
from graphopt.kernels.fp8_dequantize_triton import WARPS, dequantize_constants, dequantize_kernel
from graphopt.kernels.fp8_format import GRIDS, Cast
from graphopt.kernels.fp8_launch_triton import (
    GIVEN,
    Scaling,
    Tile,
    amax_constants,
    cast_constants,
    cast_options,
    rounds_once,
)
from graphopt.kernels.launch_triton import options_for
from tests.support.kernel_targets import compiled_with

TARGETS = (80, 89, 90, 100)
CONVERSIONS = {"e4m3": "cvt.rn.satfinite.e4m3x2.f32", "e5m2": "cvt.rn.satfinite.e5m2x2.f32"}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BOTH = [(grid, grid[::-1]) for grid in GRIDS]
SINGLE = [(grid,) for grid in GRIDS]
STRIDES = ("x_row_stride", "codes_row_stride", "second_codes_column_stride")


@pytest.fixture(scope="module")
def interpreted():
    """Triton decides when it is imported whether it interprets, so a process of its own runs the cases."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_casts"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreted_casts_give_the_bits_of_the_reference(interpreted):
    different = interpreted["different"]
    assert len(different) > 100
    assert {case: number for case, number in different.items() if number} == {}


def test_no_byte_is_moved_twice(interpreted):
    """Beside what must be moved there are only largest magnitudes found before: 4 bytes for 32 to 128 numbers."""
    for case, (moved, must_move) in interpreted["moved"].items():
        assert must_move <= moved <= 1.05 * must_move, case


def casts_of(grids, format):
    """Casts of a large matrix without memory: as it lies and, second, of its transpose."""
    x = torch.empty(4096, 4096, device="meta")
    first = Cast.empty(x, format, grids[0])
    return [first, *(Cast.empty(x.t(), format, grid[::-1]).t() for grid in grids[1:])]


def compiled_cast(grids, arch, *, format="e4m3", dtype=torch.bfloat16, scalings=None):
    """A cast as it is launched on sm_``arch`` for a matrix with contiguous rows and sides that 16 divides."""
    casts = casts_of(grids, format)
    tile = Tile.of(casts)
    converts = rounds_once(divmod(arch, 10))
    scalings = scalings or [Scaling.of(cast.grid, cast.codes.shape, tile) for cast in casts]
    constants = cast_constants(tile, scalings) | {
        "FORMAT": FORMATS.index(format),
        "POWER_OF_TWO": True,
        "HARDWARE": converts,
        "x_column_stride": 1,
        "codes_column_stride": 1,
        "second_codes_row_stride": 1,
    }
    signature = {name: "i32" for name in cast_kernel.arg_names if not name.isupper()} | {
        "x_ptr": f"*{TYPES[dtype]}",
        **dict.fromkeys(("codes_ptr", "second_codes_ptr"), "*u8"),
        **dict.fromkeys(("scale_ptr", "second_scale_ptr"), "*fp32"),
        **dict.fromkeys(("amax_ptr", "second_amax_ptr"), "*i32"),
    }
    aligned = ("x_ptr", "codes_ptr", "second_codes_ptr", "num_rows", "num_columns", *STRIDES)
    options = cast_options(tile, converts=converts)
    return compiled_with(cast_kernel, signature, constants, options, arch, multiples_of_16=aligned)


def compiled_amax(arch, wanted=(1, 2, 3)):
    tile = Tile(128, 128)
    signature = {name: "i32" for name in amax_kernel.arg_names if not name.isupper()} | {
        "x_ptr": "*bf16",
        **dict.fromkeys(("row_amax_ptr", "column_amax_ptr", "tensor_amax_ptr"), "*i32"),
    }
    constants = amax_constants(tile, wanted) | {"x_column_stride": 1}
    aligned = ("x_ptr", "num_rows", "num_columns", "x_row_stride")
    return compiled_with(amax_kernel, signature, constants, options_for(tile.warps), arch, multiples_of_16=aligned)


def compiled_dequantize(arch, grid, *, format="e4m3", dtype=torch.bfloat16):
    signature = {name: "i32" for name in dequantize_kernel.arg_names if not name.isupper()} | {
        "codes_ptr": "*u8",
        "scale_ptr": "*fp32",
        "values_ptr": f"*{TYPES[dtype]}",
    }
    constants = dequantize_constants(grid, format) | {"codes_column_stride": 1}
    aligned = ("codes_ptr", "values_ptr", "num_rows", "num_columns", "codes_row_stride")
    return compiled_with(dequantize_kernel, signature, constants, options_for(WARPS), arch, multiples_of_16=aligned)


def assert_sound(compiled):
    """Nothing spills; each operation is rounded once and keeps denormals; no float minimum or maximum passes NaN on."""
    assert (compiled.stack_bytes, compiled.local_bytes) == (0, 0)
    for forbidden in ("fma.", ".ftz", ".approx", "min.NaN", "max.NaN"):
        assert forbidden not in compiled.ptx


def assert_wide(compiled, *, num_layouts, words_of_a_thread):
    """Words of 16 bytes of x are read once, and of each layout of codes written once; only scales are narrow."""
    loads, stores = compiled.moved("ld"), compiled.moved("st")
    assert set(loads) <= {"v4.b32", "b32"} and set(stores) <= {"v4.b32", "b32"}
    assert loads["v4.b32"] == words_of_a_thread
    assert stores["v4.b32"] == 2 * num_layouts


def assert_cast_is_sound_and_wide(grids, arch, **changed):
    compiled = compiled_cast(grids, arch, **changed)
    words = 8 if changed.get("dtype") == torch.float32 else 4
    assert_sound(compiled)
    assert_wide(compiled, num_layouts=len(grids), words_of_a_thread=words)
    format = changed.get("format", "e4m3")
    expected = {CONVERSIONS[format]} if rounds_once(divmod(arch, 10)) else set()
    assert set(re.findall(r"cvt\.[\w.]*e[45]m[23]x2[\w.]*", compiled.ptx)) == expected


@pytest.mark.parametrize("grids", [*SINGLE, *BOTH], ids=str)
def test_every_cast_reads_and_writes_wide_words_once_on_hopper(grids):
    assert_cast_is_sound_and_wide(grids, 90)


@pytest.mark.parametrize("arch", TARGETS)
def test_each_target_converts_as_it_can_and_spills_nothing(arch):
    assert_cast_is_sound_and_wide(((1, 128), (128, 1)), arch)
    assert_cast_is_sound_and_wide(((0, 0), (0, 0)), arch, format="e5m2", dtype=torch.float16, scalings=[GIVEN, GIVEN])
    assert_sound(compiled_amax(arch))
    assert_sound(compiled_dequantize(arch, (1, 128)))


def test_values_are_written_in_wide_words():
    compiled = compiled_dequantize(90, (128, 128))
    assert compiled.moved("ld")["v4.b32"] == 2 and compiled.moved("st")["v4.b32"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_no_other_form_spills(format, dtype, arch):
    for grids in (*SINGLE, *BOTH):
        assert_cast_is_sound_and_wide(grids, arch, format=format, dtype=dtype)
    for grid in GRIDS:
        assert_sound(compiled_dequantize(arch, grid, format=format, dtype=dtype))
    for wanted in ((1,), (2,), (3,), (1, 2)):
        assert_sound(compiled_amax(arch, wanted))
