"""The Triton kernels without a GPU: interpreted against the references, and compiled for each GPU that is supported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from graphopt.kernels import block_adam, block_lion
from graphopt.kernels.block_adam_triton import block_adam_kernel
from graphopt.kernels.block_lion_triton import block_lion_kernel
from graphopt.kernels.block_maps import MAPS
from graphopt.kernels.block_quantize_triton import dequantize_kernel, quantize_kernel
from graphopt.kernels.launch_triton import Tiling, compiled_for
from tests.support.blocks import options
from tests.support.kernel_targets import compile_for

TARGETS = (80, 89, 90, 100)
UPDATE_SIGNATURE = {
    "tile_items_ptr": "*i32",
    "table_ptr": "*i64",
    "scalars_ptr": "*fp32",
    "factor_ptr": "*fp32",
    "trees_ptr": "*fp32",
}
QUANTIZE_SIGNATURE = {
    "values_ptr": "*fp32",
    "codes_ptr": "*u8",
    "scales_ptr": "*fp32",
    "trees_ptr": "*fp32",
    "num_elements": "i64",
    "key": "i64",
    "offset": "i64",
}
DEQUANTIZE_SIGNATURE = {
    "codes_ptr": "*u8",
    "scales_ptr": "*fp32",
    "values_ptr": "*fp32",
    "trees_ptr": "*fp32",
    "num_elements": "i64",
}
FLOATS = {"torch.float32": 4, "torch.bfloat16": 2}


@pytest.fixture(scope="module")
def interpreted():
    """Triton decides when it is imported whether it interprets, so a process of its own runs the cases."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_kernels"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreted_kernels_give_the_bits_of_the_references(interpreted):
    different = interpreted["different"]
    assert len(different) > 40
    assert {case: number for case, number in different.items() if number} == {}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("kernel", "spec"), [("adam", block_adam.SPEC), ("lion", block_lion.SPEC)])
def test_no_byte_is_moved_twice(kernel, spec, dtype, interpreted):
    size = FLOATS[dtype]
    floor = spec.floor_bytes(interpreted["num_elements"], 256, parameter_bytes=size, gradient_bytes=size)
    assert floor <= interpreted["moved"][f"{kernel} {dtype}"] <= 1.05 * floor


def test_the_floor_is_each_tensor_once_a_direction():
    sizes = {"parameter_bytes": 4, "gradient_bytes": 4}
    assert block_adam.SPEC.floor_bytes(1024, 256, **sizes) == 1024 * (4 + 4 + 4 + 2 + 2) + 4 * 16
    assert block_lion.SPEC.floor_bytes(1024, 256, **sizes) == 1024 * (4 + 4 + 4 + 1 + 1) + 4 * 8


def compiled_update(kernel, arch, *, map="companded", block=256, stochastic=True, is_aligned=True):
    tiling = Tiling.of(block)
    choices = {"STOCHASTIC_WEIGHT": stochastic}
    if kernel is block_adam_kernel:
        choices["STOCHASTIC_STATE"] = stochastic
    constants = compiled_for(tiling, options(map=map, block=block), is_aligned=is_aligned) | choices
    return compile_for(kernel, UPDATE_SIGNATURE, constants, tiling, arch)


def assert_nothing_spills(compiled):
    assert (compiled.stack_bytes, compiled.local_bytes) == (0, 0)


def assert_wide(compiled):
    """Whole tiles move 16 bytes a thread of each float tensor and 8 of each code tensor."""
    loads, stores = compiled.unguarded("ld"), compiled.unguarded("st")
    assert set(loads) <= {"b32", "b64", "v2.b32", "v4.b32"}
    assert set(stores) <= {"v2.b32", "v4.b32"}
    assert loads["v4.b32"] >= 6 and stores["v4.b32"] >= 3 and loads["v2.b32"] >= 1


def assert_rounded_once(compiled):
    assert "fma." not in compiled.ptx and ".ftz" not in compiled.ptx and ".approx" not in compiled.ptx


@pytest.mark.parametrize("arch", TARGETS)
def test_adam_fits_in_registers_and_moves_wide_words(arch):
    compiled = compiled_update(block_adam_kernel, arch)
    assert_nothing_spills(compiled)
    assert_wide(compiled)
    assert_rounded_once(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
def test_lion_fits_in_registers_and_moves_wide_words(arch):
    compiled = compiled_update(block_lion_kernel, arch)
    assert_nothing_spills(compiled)
    assert_wide(compiled)
    assert_rounded_once(compiled)


# Blocks above 4096 need 1024 threads with 64 registers each, and do spill.
@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kernel", [block_adam_kernel, block_lion_kernel], ids=["adam", "lion"])
def test_no_other_form_spills(kernel, arch):
    for changed in (
        {"map": "linear"},
        {"map": "dynamic"},
        {"block": 32},
        {"block": 2048},
        {"block": 4096},
        {"block": 100, "is_aligned": False},
        {"stochastic": False},
    ):
        assert_nothing_spills(compiled_update(kernel, arch, **changed))


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("map", range(len(MAPS)), ids=MAPS)
def test_quantizing_fits_in_registers(map, arch):
    tiling = Tiling.of(256)
    constants = {"BLOCK": 256, "PADDED": 256, "BLOCKS": tiling.blocks, "MAP": map, "IS_SIGNED": False}
    drawn = constants | {"IS_DRAWN": True}
    for kernel, signature, chosen in (
        (quantize_kernel, QUANTIZE_SIGNATURE, drawn),
        (dequantize_kernel, DEQUANTIZE_SIGNATURE, constants),
    ):
        compiled = compile_for(kernel, signature, chosen, tiling, arch)
        assert_nothing_spills(compiled)
        assert_rounded_once(compiled)
