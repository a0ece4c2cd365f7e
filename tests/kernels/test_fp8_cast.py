"""Casts to FP8 on the CPU: the reference's bits in every grid, layout and dtype, errors in bounds, little workspace."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from graphopt.execute.measure import measure_memory
from graphopt.kernels import cpu_library, fp8_pieces
from graphopt.kernels.fp8_cast import (
    FLOATS,
    dequantize,
    quantize,
    quantize_both,
    quantize_delayed,
    quantize_delayed_both,
)
from graphopt.kernels.fp8_format import FORMATS, GRIDS, decode, encode, format_named
from tests.support.casts import laid_out, matrix, num_different, reference

SHAPES = ((1, 1), (1, 300), (300, 1), (7, 123), (129, 257))


@pytest.fixture(params=["compiled", "plain torch"])
def form(request, monkeypatch):
    """The compiled form, and plain torch with pieces so small that the matrices of tests have many."""
    if request.param == "plain torch":
        monkeypatch.setenv(cpu_library.DISABLE, "1")
        monkeypatch.setattr(fp8_pieces, "ELEMENTS_OF_A_PIECE", 1 << 9)
    elif cpu_library.library() is None:
        pytest.skip(cpu_library.cpu_path())


def signal_to_noise(exact, found):
    return 20 * torch.log10(exact.norm() / (exact - found).norm())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_dtype_layout_and_size_gives_the_bits_of_the_reference(grid, format, form):
    torch.manual_seed(0)
    for number, (shape, dtype, layout) in enumerate(product(SHAPES, FLOATS, ("rows", "columns", "neither"))):
        x = laid_out(matrix(*shape, dtype), layout)
        found = quantize(x, format, grid, power_of_two=number % 2 == 0)
        assert num_different(found, reference(x, format, grid, power_of_two=number % 2 == 0)) == 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_both_layouts_are_two_casts(grid, form):
    torch.manual_seed(0)
    for grid_t in GRIDS:
        x = matrix(131, 200, torch.bfloat16)
        expected = (*reference(x, "e5m2", grid), *reference(x.t(), "e5m2", grid_t))
        assert num_different(quantize_both(x, "e5m2", grid, grid_t, power_of_two=False), expected) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_a_given_scale_saturates_and_the_largest_magnitude_is_told(format, form):
    torch.manual_seed(0)
    largest = format_named(format).largest
    for value in (1.0, 1e6, torch.inf, torch.nan):
        x = torch.randn(33, 70).bfloat16()
        x[32, 3] = value
        scale = torch.tensor([[1.0 / largest]])
        expected = encode(x, scale, (0, 0), format_named(format)).contiguous()
        codes, codes_t, amax = quantize_delayed_both(x, scale, format)
        assert num_different((codes, codes_t), (expected, expected.t().contiguous())) == 0
        assert num_different(quantize_delayed(x, scale, format), (expected, amax)) == 0
        torch.testing.assert_close(amax, x.abs().amax().float(), rtol=0, atol=0, equal_nan=True)
        assert codes.float().isfinite().sum() == x.numel() - (value != value)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_and_scales_come_back_rounded_once(grid, form):
    torch.manual_seed(0)
    x = torch.randn(131, 200)
    codes, scale = quantize(x, "e4m3", grid, power_of_two=False)
    for dtype in FLOATS:
        expected = decode(codes, scale, grid).to(dtype)
        assert num_different([dequantize(codes, scale, grid, dtype)], [expected]) == 0
        turned = dequantize(codes.t(), scale.t(), grid[::-1], dtype)
        assert num_different([turned], [expected.t().contiguous()]) == 0


@pytest.mark.parametrize(("format", "decibel"), [("e4m3", 25.0), ("e5m2", 24.0)])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_error_of_normal_numbers_is_that_of_the_format(power_of_two, grid, format, decibel):
    """Rounding is off by up to half a last place: 31 dB are left with 3 bits of mantissa, 25 with 2."""
    torch.manual_seed(0)
    x = torch.randn(512, 512, dtype=torch.float64)
    codes, scale = quantize(x.float(), format, grid, power_of_two=power_of_two)
    assert signal_to_noise(x, decode(codes, scale, grid).double()) > decibel


def test_finer_grids_keep_what_outliers_would_drown():
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    x[::100] *= 1e6  # the smallest code of the tensor stands for more than any number of the other rows
    quiet = x[1:100].double()
    found = {
        grid: signal_to_noise(quiet, decode(*quantize(x, "e4m3", grid, power_of_two=False), grid)[1:100].double())
        for grid in GRIDS
    }
    assert found[1, 0] > 25 and found[1, 128] > 25 and found[0, 0] < 1


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_rows_beside_a_row_of_zeros_inf_or_nan_keep_their_bits(value):
    torch.manual_seed(0)
    x = torch.randn(16, 200)
    x[3] = value
    others = [*range(3), *range(4, 16)]
    for grid in ((1, 0), (1, 128)):
        codes, scale = quantize(x, "e4m3", grid, power_of_two=False)
        alone, alone_scale = quantize(x[others], "e4m3", grid, power_of_two=False)
        assert num_different((codes[others], scale[others]), (alone, alone_scale)) == 0
        assert torch.equal(scale[3].isnan(), torch.full_like(scale[3], value != 0).bool())
        assert bool((codes[3].view(torch.uint8) == (0 if value == 0 else 0x7F)).all())


def test_a_matrix_without_elements_has_scales_of_one():
    for shape in ((0, 5), (5, 0), (0, 0)):
        codes, scale, codes_t, scale_t = quantize_both(torch.zeros(shape), "e4m3", (0, 0), (1, 0), power_of_two=False)
        assert codes.shape == shape and codes_t.shape == shape[::-1]
        assert torch.equal(scale, torch.ones(1, 1)) and torch.equal(scale_t, torch.ones(shape[1], 1))
        assert dequantize(codes, scale, (0, 0), torch.float32).shape == shape
        assert quantize_delayed(torch.zeros(shape), torch.ones(1, 1), "e4m3")[1] == 0


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_cast_needs_little_more_memory_than_its_results(is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setenv(cpu_library.DISABLE, "1")
    x = torch.randn(1024, 1024).bfloat16()
    for grid in GRIDS:
        result_bytes = sum(tensor.nbytes for tensor in quantize_both(x, "e4m3", grid, grid, power_of_two=False))
        peak = measure_memory(lambda grid=grid: quantize_both(x, "e4m3", grid, grid, power_of_two=False)).peak_bytes
        assert peak - result_bytes < 1 << 20


def test_the_number_of_threads_changes_nothing():
    torch.manual_seed(0)
    x = matrix(1000, 257, torch.bfloat16)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for grid in GRIDS:
            expected = (*reference(x, "e4m3", grid), *reference(x.t(), "e4m3", grid))
            assert num_different(quantize_both(x, "e4m3", grid, grid, power_of_two=False), expected) == 0
    finally:
        torch.set_num_threads(num_threads)


def test_wrong_arguments_are_named():
    x, scale = torch.zeros(4, 4), torch.ones(1, 1)
    codes, _ = quantize(x, "e4m3", (0, 0), power_of_two=False)
    with pytest.raises(TypeError, match="float64"):
        quantize(x.double(), "e4m3", (0, 0), power_of_two=False)
    with pytest.raises(ValueError, match="matrix"):
        quantize(x[None], "e4m3", (0, 0), power_of_two=False)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        quantize(x, "e4m3", (2, 2), power_of_two=False)
    with pytest.raises(ValueError, match="one number for the whole tensor"):
        quantize_delayed(x, scale[0], "e4m3")
    with pytest.raises(ValueError, match=r"float32\[4, 1\]"):
        dequantize(codes, scale, (1, 0), torch.float32)
    with pytest.raises(TypeError, match="int8"):
        dequantize(codes, scale, (0, 0), torch.int8)
