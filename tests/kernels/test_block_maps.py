"""The maps of codes: what is exactly representable, how far off the rest is, and the dynamic tree of bitsandbytes."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels.block_maps import MAPS, decode_signed, decode_unsigned, encode_signed, encode_unsigned, tree
from graphopt.kernels.block_quantize import Draw, dequantize_reference, quantize_reference

SIZES_OF_VALUES = (1e-40, 1e-30, 1e-12, 1e-3, 1.0, 1e30)


def block_of(size, is_signed):
    torch.manual_seed(0)
    values = torch.randn(8, 256) * size
    values = values if is_signed else values.abs()
    values[:, 3] = 0.0
    values[:, 7] = values.abs().amax(dim=1) * 1.5
    return values


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("size", SIZES_OF_VALUES)
def test_zero_and_the_largest_of_a_block_are_exact(size, map):
    for is_signed in (True, False):
        values = block_of(size, is_signed)
        moment = quantize_reference(values, block=256, map=map, is_signed=is_signed)
        found = dequantize_reference(moment, block=256, map=map)
        assert torch.equal(found[:, 3], values[:, 3])
        assert torch.equal(found[:, 7], values[:, 7])


@pytest.mark.parametrize("map", ["companded", "linear"])
def test_codes_survive_decoding_and_encoding(map):
    signed = torch.arange(-127, 128).to(torch.int8)[None]
    unsigned = torch.arange(0, 256).to(torch.uint8)[None]
    scale = torch.tensor([0.37])
    assert torch.equal(encode_signed(decode_signed(signed, scale, map), map)[0], signed)
    assert torch.equal(encode_unsigned(decode_unsigned(unsigned, scale, map), map, None)[0], unsigned)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("is_signed", [True, False])
def test_blocks_of_zeros_are_codes_and_scale_zero(is_signed, map):
    values = torch.zeros(2, 256)
    moment = quantize_reference(values, block=256, map=map, is_signed=is_signed)
    assert not moment.codes.any() and not moment.scales.any()
    assert torch.equal(dequantize_reference(moment, block=256, map=map), values)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_shows_and_its_neighbours_do_not(value, map):
    values = torch.rand(2, 256)
    values[0, 5] = value
    for is_signed in (True, False):
        moment = quantize_reference(values, block=256, map=map, is_signed=is_signed)
        found = dequantize_reference(moment, block=256, map=map)
        assert found[0].isnan().all() and found[1].isfinite().all()


def test_no_second_moment_above_zero_is_rounded_to_zero():
    values = torch.full((1, 256), 1e-20)
    values[0, 0] = 1.0
    codes, _ = encode_unsigned(values, "companded", None)
    drawn, _ = encode_unsigned(values, "companded", torch.zeros_like(values))
    assert codes.min() == 1 and drawn.min() == 1


def test_companded_codes_are_half_a_code_off_at_most():
    values = torch.linspace(-1, 1, 4001)[None]
    found = decode_signed(*encode_signed(values, "companded"), "companded")
    root, found_root = values.abs().sqrt(), found.abs().sqrt()
    # Half a code, and four roundings of float32 in the root.
    assert (root - found_root).abs().max() <= 0.5 / 127 + 4 * 2**-24
    assert torch.equal(found.sign(), torch.where(found == 0, 0.0, values.sign()))


def test_the_trees_are_those_of_bitsandbytes():
    signed, unsigned = tree(is_signed=True), tree(is_signed=False)
    for values in (signed, unsigned):
        assert len(values.unique()) == 256 and values[255] == 1.0
    # From the published table: the ends, the neighbours of zero and of one.
    expected = torch.tensor([-0.99296875, -0.97890625, -5.5e-7, 0.0, 5.5e-7, 0.99296875])
    torch.testing.assert_close(signed[[0, 1, 126, 127, 128, 254]], expected, rtol=1e-6, atol=0)
    expected = torch.tensor([0.0, 3.25e-7, 7.75e-7, 0.996484375])
    torch.testing.assert_close(unsigned[[0, 1, 2, 254]], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_signed", [True, False])
def test_dynamic_codes_are_the_nearest_of_the_tree(is_signed):
    torch.manual_seed(0)
    values = torch.randn(4, 256)
    values = values if is_signed else values.square()
    moment = quantize_reference(values, block=256, map="dynamic", is_signed=is_signed)
    ratio = values / values.abs().amax(dim=1, keepdim=True)
    distances = (ratio[..., None] - tree(is_signed=is_signed)).abs()
    codes = moment.codes.int() + 128 * is_signed
    chosen = distances.gather(2, codes[..., None].long())[..., 0]
    # The half way point is rounded to float32.
    assert (chosen <= distances.amin(dim=2) + 2**-24).all()


@pytest.mark.parametrize("map", MAPS)
def test_stochastic_rounding_is_right_on_average_in_code_space(map):
    values = torch.rand(1, 256).square()
    values[0, 0] = 1.0
    draws = [
        quantize_reference(values, block=256, map=map, is_signed=False, draw=Draw(1, step, 0)).codes.double()
        for step in range(400)
    ]
    codes = torch.stack(draws)
    assert (codes.amax(dim=0) - codes.amin(dim=0)).max() == 1
    if map == "dynamic":
        return
    exponent = 0.25 if map == "companded" else 1.0
    place = values.double() ** exponent * 255
    # 400 draws of a variance of at most 1/4: five standard deviations are 0.125.
    assert (codes.mean(dim=0) - place)[place >= 1].abs().max() < 0.125


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="companded, linear, dynamic, not 'log'"):
        quantize_reference(torch.ones(4), block=256, map="log", is_signed=True)
    with pytest.raises(ValueError, match="1 to 16384 elements, not 0"):
        quantize_reference(torch.ones(4), block=0, map="linear", is_signed=True)
