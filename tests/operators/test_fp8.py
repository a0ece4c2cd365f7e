"""The FP8 operators: what they promise to the compiler, and how near their numbers are."""

from __future__ import annotations

import pytest
import torch

from graphopt.ir.spec import TensorSpec
from graphopt.operators import fp8
from tests.support.fp8 import sqnr
from tests.support.graphs import program_of

GRIDS = ([0, 0], [1, 0], [0, 1], [1, 128], [128, 1], [128, 128])
FORMATS = ("e4m3", "e5m2")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The noise of rounding to four and to three significant bits, measured over normal numbers.
CAST_DECIBELS = {"e4m3": 31, "e5m2": 25}

CALLS = {
    "quantize": lambda x: fp8.QUANTIZE(x, "e4m3", [1, 128], True),
    "transposed": lambda x: fp8.QUANTIZE_TRANSPOSED(x, "e5m2", [128, 1], False),
    "both": lambda x: fp8.QUANTIZE_BOTH(x, "e4m3", [1, 128], [0, 0], True),
    "delayed": lambda x: fp8.QUANTIZE_DELAYED(x, torch.ones(1, 1), "e4m3"),
    "delayed both": lambda x: fp8.QUANTIZE_DELAYED_BOTH(x, torch.ones(1, 1), "e4m3"),
    "dequantize": lambda x: fp8.DEQUANTIZE(*fp8.QUANTIZE(x, "e4m3", [1, 0], True), [1, 0], torch.bfloat16),
    "product": lambda x: product(x, torch.randn(259, 33), "e4m3", "e5m2", [1, 128], [128, 1]),
}


def product(a, b, a_format, b_format, a_grid, b_grid, dtype=torch.bfloat16):
    quantized = fp8.QUANTIZE(a, a_format, a_grid, False), fp8.QUANTIZE(b, b_format, b_grid, False)
    return fp8.MATMUL(*quantized[0], a_grid, *quantized[1], b_grid, None, dtype)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("is_turned", [False, True])
def test_what_is_inferred_is_what_comes(call, is_turned):
    x = torch.randn(259, 130).t() if is_turned else torch.randn(130, 259)
    program = program_of(lambda x: call(x), x)
    expected = [output.spec for output in program.signature.outputs]
    results = call(x)
    came = [TensorSpec.of(value) for value in (results if isinstance(results, (tuple, list)) else (results,))]
    assert came == expected


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_cast_of_normal_numbers_is_as_near_as_its_bits(grid, format):
    for dtype in DTYPES:
        for power_of_two in (False, True):
            x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
            codes, scale = fp8.QUANTIZE(x, format, grid, power_of_two)
            assert sqnr(x, fp8.DEQUANTIZE(codes, scale, grid, torch.float32)) >= CAST_DECIBELS[format]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_transpose_has_the_codes_of_the_matrix(grid):
    x, turned_grid = torch.randn(130, 259), grid[::-1]
    codes, scale = fp8.QUANTIZE(x, "e4m3", grid, True)
    codes_t, scale_t = fp8.QUANTIZE_TRANSPOSED(x, "e4m3", turned_grid, True)
    assert codes_t.is_contiguous() and torch.equal(codes_t.float(), codes.t().float())
    assert torch.equal(scale_t, scale.t())
    both = fp8.QUANTIZE_BOTH(x, "e4m3", grid, turned_grid, True)
    for came, expected in zip(both, (codes, scale, codes_t, scale_t), strict=True):
        assert torch.equal(came.float(), expected.float())


@pytest.mark.parametrize(
    ("formats", "decibels"),
    # Both operands add their noise: two of 31 dB are one of 28, and with one of 25 it is 24.
    [(("e4m3", "e4m3"), 28), (("e5m2", "e4m3"), 24)],
)
@pytest.mark.parametrize(("a_grid", "b_grid"), [([0, 0], [0, 0]), ([1, 0], [0, 1]), ([1, 128], [128, 128])], ids=str)
def test_a_product_is_as_near_as_its_operands(formats, decibels, a_grid, b_grid):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(160, 300, generator=generator), torch.randn(300, 170, generator=generator)
    came = product(a, b, *formats, a_grid, b_grid)
    assert sqnr(a.double() @ b.double(), came) >= decibels


@pytest.mark.parametrize("grid", [[0, 0], [1, 0]], ids=str)
def test_a_product_of_codes_is_exact_up_to_float32(grid):
    a, b = torch.randn(65, 300), torch.randn(300, 70)
    b_grid = grid[::-1]
    wide = [
        fp8.DEQUANTIZE(*fp8.QUANTIZE(value, "e4m3", use, False), use, torch.float32).double()
        for value, use in ((a, grid), (b, b_grid))
    ]
    came = product(a, b, "e4m3", "e4m3", grid, b_grid, torch.float32)
    # float32 rounds by 2**-24, 144 dB; the sum of 300 terms and two scales some more.
    assert sqnr(wide[0] @ wide[1], came) >= 120
