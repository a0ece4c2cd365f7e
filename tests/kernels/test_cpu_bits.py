"""The compiled CPU kernels give the bits of plain torch: every map, dtype, option, layout, size and kind of number."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from graphopt.kernels import block_adam, block_lion, cpu_library
from graphopt.kernels.block_maps import MAPS
from graphopt.kernels.block_quantize import Draw, dequantize, dequantize_reference, quantize, quantize_reference
from graphopt.kernels.block_update import FLOATS
from graphopt.kernels.round_weights import round_stochastically
from tests.support.blocks import adam_scalars, assert_same_bits, copy_of, item_of, lion_scalars, options

SIZES = (1, 7, 255, 256, 257, 1000)
KERNELS = {"adam": (block_adam, adam_scalars, 2), "lion": (block_lion, lion_scalars, 1)}

pytestmark = pytest.mark.skipif(cpu_library.library() is None, reason=f"nothing to compare: {cpu_library.cpu_path()}")


def assert_compiled_equals_torch(kernel, items, choices, factor=None, num_steps=2, **changed):
    module, scalars_of, _ = KERNELS[kernel]
    compiled = [copy_of(item) for item in items]
    expected = [copy_of(item) for item in items]
    for step in range(1, num_steps + 1):
        arguments = (scalars_of(step, **changed), choices)
        module.update_(compiled, *arguments, factor=factor, step=step)
        module.reference_(expected, *arguments, factor=factor, step=step)
    assert_same_bits(compiled, expected)
    return compiled


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("parameter_dtype", FLOATS, ids=str)
def test_every_option_size_and_gradient_dtype(parameter_dtype, map, kernel):
    torch.manual_seed(0)
    for gradient_dtype, decoupled, drawn in itertools.product(FLOATS, (True, False), (True, False)):
        items = [
            item_of(
                torch.randn(size).to(parameter_dtype),
                (torch.randn(size) * 1e-3).to(gradient_dtype),
                num_moments=KERNELS[kernel][2],
            )
            for size in SIZES
        ]
        draws_weight = drawn and parameter_dtype != torch.float16
        choices = options(map=map, decoupled=decoupled, stochastic_state=drawn, stochastic_weight=draws_weight)
        assert_compiled_equals_torch(kernel, items, choices, torch.tensor(0.7))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 1e-20, 3e18, 1e38, float("inf"), float("nan")])
def test_gradients_at_the_edges_of_float32(value, map, kernel):
    torch.manual_seed(0)
    gradient = torch.randn(600) * value
    gradient[:256] = value  # one block of it alone, one mixed, one ragged
    gradient[300] = 1.0
    item = item_of(torch.randn(600), gradient, num_moments=KERNELS[kernel][2])
    assert_compiled_equals_torch(kernel, [item], options(map=map, stochastic_state=True), num_steps=3)


@pytest.mark.parametrize("block", [1, 3, 32, 100, 2048, 16384])
def test_blocks_of_any_size(block):
    torch.manual_seed(0)
    item = item_of(torch.randn(5001), torch.randn(5001), block=block)
    assert_compiled_equals_torch("adam", [item], options(block=block, stochastic_state=True))


def layouts():
    dense = torch.randn(6, 5, 35)
    yield dense.permute(2, 0, 1), dense.permute(2, 0, 1) * 0.1
    yield dense.permute(2, 0, 1), torch.randn(35, 6, 5)
    yield torch.randn(8, 70)[3:7], torch.randn(70, 4).t()
    yield torch.randn(4, 1, 70)[:, 0], torch.randn(4, 2, 70)[:, 1]
    yield torch.randn(()), torch.randn(())
    yield torch.randn(0, 10), torch.randn(0, 10)


def test_every_layout():
    torch.manual_seed(0)
    for parameter, gradient in layouts():
        item = item_of(parameter, gradient)
        done = assert_compiled_equals_torch("adam", [item], options(stochastic_state=True))
        assert done[0].parameter.stride() == parameter.stride()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_float16_passes_through_unchanged(kernel):
    parameter = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    item = item_of(parameter, torch.zeros_like(parameter), num_moments=KERNELS[kernel][2])
    done = assert_compiled_equals_torch(kernel, [item], options(), num_steps=1, lr=0.0)
    torch.testing.assert_close(done[0].parameter, parameter, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-4, 1.0, 7e4])
def test_float16_parameters_are_rounded_to_nearest(size):
    torch.manual_seed(0)
    item = item_of((torch.randn(5000) * size).half(), torch.randn(5000))
    assert_compiled_equals_torch("adam", [item], options(), lr=size * 0.01)


def test_the_number_of_threads_changes_nothing():
    torch.manual_seed(0)
    items = [item_of(torch.randn(size), torch.randn(size)) for size in (70_000, 1, 33_333)]
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_compiled_equals_torch("adam", items, options(stochastic_state=True))
    finally:
        torch.set_num_threads(num_threads)


def test_random_numbers_across_the_end_of_a_word():
    torch.manual_seed(0)
    item = replace(item_of(torch.randn(600).bfloat16(), torch.randn(600)), offset=2**32 - 300)
    assert_compiled_equals_torch("adam", [item], options(stochastic_state=True, stochastic_weight=True))


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("is_signed", [True, False])
def test_quantizing_and_back(is_signed, map):
    torch.manual_seed(0)
    values = torch.randn(35, 6, 29).permute(1, 0, 2)
    values = values if is_signed else values.square()
    for block, draw in itertools.product((256, 2048, 7), (None, Draw(seed=1, step=3, offset=99))):
        arguments = {"block": block, "map": map, "is_signed": is_signed, "draw": draw}
        moment, expected = quantize(values, **arguments), quantize_reference(values, **arguments)
        assert torch.equal(moment.codes, expected.codes) and torch.equal(moment.scales, expected.scales)
        found = dequantize(moment, block=block, map=map)
        assert torch.equal(found, dequantize_reference(moment, block=block, map=map))


def test_rounding_weights_stochastically(monkeypatch):
    torch.manual_seed(0)
    values = torch.cat((torch.randn(5000), torch.tensor([0.0, -0.0, 1e-45, 3.4e38, torch.inf, -torch.inf, torch.nan])))
    compiled = round_stochastically(values, seed=1, step=2, offset=7)
    monkeypatch.setenv(cpu_library.DISABLE, "1")
    expected = round_stochastically(values, seed=1, step=2, offset=7)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0, equal_nan=True)
