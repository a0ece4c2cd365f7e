"""FP8 numbers: rounding, saturation, the rule of a scale, and what becomes of zeros, denormals, Inf and NaN."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels.fp8_format import (
    FORMATS,
    GRIDS,
    SMALLEST_SCALE,
    check_grid,
    decode,
    encode,
    format_named,
    format_of,
    grid_shape,
    next_power_of_two,
    scale_of,
)
from tests.support.casts import cast_bytes, reference

UNIT = torch.ones(1, 1)


def test_every_number_becomes_the_nearest_code_with_ties_to_even():
    """In float64 against a table of all values: bfloat16 holds every midpoint between two codes."""
    numbers = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    for kind in FORMATS.values():
        values = torch.arange(128).to(torch.uint8).view(kind.dtype).double()
        values = values[values.isfinite()]  # in the order of the codes
        magnitude = numbers.abs().double().clamp(max=kind.largest)
        below = torch.searchsorted(values, magnitude, right=True) - 1
        above = (below + 1).clamp(max=len(values) - 1)
        way = (magnitude - values[below]) - (values[above] - magnitude)
        nearest = torch.where((way > 0) | ((way == 0) & (below % 2 == 1)), above, below)
        expected = nearest + 128 * torch.signbit(numbers)
        found = encode(numbers[None], UNIT, (0, 0), kind)[0].view(torch.uint8)
        assert torch.equal(found.long(), expected)


def test_what_is_beyond_the_range_becomes_the_largest_and_nan_stays():
    x = torch.tensor([[448.0, 464.0, 480.0, 1000.0, -1e4, 6e4, 3e38, torch.inf, -torch.inf, torch.nan, -torch.nan]])
    found = encode(x, UNIT, (0, 0), FORMATS["e4m3"]).float()[0]
    assert found[:4].tolist() == [448.0] * 4 and found[4] == -448 and found[5:9].tolist() == [448.0, 448, 448, -448]
    assert found[9:].isnan().all()
    found = encode(x, UNIT, (0, 0), FORMATS["e5m2"])
    assert found.float()[0, 5:9].tolist() == [57344.0, 57344, 57344, -57344]
    assert found.view(torch.uint8)[0, 9:].tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_have_scale_one_and_codes_zero(format):
    for grid in GRIDS:
        codes, scale = reference(torch.zeros(130, 130), format, grid)
        assert torch.equal(scale, torch.ones_like(scale)) and not codes.view(torch.uint8).any()
    assert encode(torch.tensor([[-0.0]]), UNIT, (0, 0), FORMATS[format]).view(torch.uint8).item() == 0x80


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-36, 3.4e38])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_the_smallest_and_largest_are_finite_with_finite_reciprocals(power_of_two, amax):
    for kind in FORMATS.values():
        scale = scale_of(torch.tensor(amax), kind, power_of_two=power_of_two)
        assert scale >= SMALLEST_SCALE and torch.isfinite(scale) and torch.isfinite(1.0 / scale)
        assert torch.isfinite(decode(*reference(torch.tensor([[amax, -amax]]), kind.name, (0, 0)), (0, 0))).all()


def test_a_scale_of_inf_or_nan_is_nan():
    amax = torch.tensor([torch.inf, torch.nan, 1.0])
    for power_of_two in (False, True):
        assert scale_of(amax, FORMATS["e4m3"], power_of_two=power_of_two).isnan().tolist() == [True, True, False]


def test_a_power_of_two_is_the_next_one_and_itself():
    scale = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-126, 1.5 * 2.0**-126, 2.0**100])
    expected = torch.tensor([1.0, 2.0, 1.0, 2.0**-126, 2.0**-125, 2.0**100])
    assert torch.equal(next_power_of_two(scale), expected)


def test_scales_have_the_shape_of_their_grid_of_empty_tensors_too():
    shapes = {grid: grid_shape((129, 257), grid) for grid in GRIDS}
    assert shapes == {
        (0, 0): (1, 1),
        (1, 0): (129, 1),
        (0, 1): (1, 257),
        (1, 128): (129, 3),
        (128, 1): (2, 257),
        (128, 128): (2, 3),
    }
    assert grid_shape((0, 5), (0, 0)) == (1, 1) and grid_shape((0, 5), (1, 0)) == (0, 1)


def test_a_cast_moves_its_matrix_once_or_twice_and_each_byte_of_codes():
    assert cast_bytes((256, 512), 2, [(1, 0)]) == 256 * 512 * 3 + 4 * 256
    assert cast_bytes((256, 512), 2, [(0, 0)]) == 256 * 512 * 5 + 4
    assert cast_bytes((256, 512), 4, [(1, 128), (128, 1)]) == 256 * 512 * 6 + 4 * (256 * 4 + 2 * 512)


def test_what_is_not_in_use_is_refused_by_name():
    with pytest.raises(ValueError, match="e4m3, e5m2"):
        format_named("e3m4")
    with pytest.raises(ValueError, match=r"\(1, 128\).*got \(64, 64\)"):
        check_grid((64, 64))
    with pytest.raises(TypeError, match=r"float8_e4m3fn.*got torch.float32"):
        format_of(UNIT)
