"""One step with 8-bit state against one in float32, by bitsandbytes' protocol and beside its own formula."""

from __future__ import annotations

import pytest
import torch

from tests.support.one_step import (
    BLOCK,
    LR,
    BitsandbytesAdamW,
    OwnAdamW,
    PackageAdamW,
    dynamic_map,
    quantized,
    step_errors,
)

# bitsandbytes' own bounds on its own optimizer.
PARAMETER = {torch.float32: 6e-5, torch.bfloat16: 1.7e-4}
RELATIVE = {torch.float32: 6e-4, torch.bfloat16: 1.6e-3}
DTYPES = list(PARAMETER)
COLUMNS = [32, pytest.param(1024, marks=pytest.mark.slow), pytest.param(4097, marks=pytest.mark.slow)]


def own(shape, *, weight_decay=0.0, map="companded", stochastic=True):
    return OwnAdamW(shape, weight_decay=weight_decay, map=map, stochastic=stochastic)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_step_is_that_of_float32(columns, dtype, weight_decay):
    shape = (1024, columns)
    errors = step_errors(own(shape, weight_decay=weight_decay), shape, dtype, weight_decay=weight_decay)
    assert errors.parameter < PARAMETER[dtype]
    assert errors.relative < RELATIVE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_as_exact_as_that_of_bitsandbytes(dtype):
    """Both compute in float32 from what they keep; the last bits depend on the order of operations."""
    shape = (1024, 32)
    ours = step_errors(own(shape, weight_decay=0.1), shape, dtype, weight_decay=0.1)
    theirs = step_errors(BitsandbytesAdamW(shape, weight_decay=0.1), shape, dtype, weight_decay=0.1)
    assert ours.parameter <= 1.05 * theirs.parameter + torch.finfo(torch.float32).eps * LR


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_companded_moments_lose_less_than_those_of_bitsandbytes(stochastic):
    """Stochastic rounding may be off by a whole code instead of half of one, and is still the better map."""
    shape = (1024, 32)
    ours = step_errors(own(shape, stochastic=stochastic), shape, torch.float32, weight_decay=0.0)
    theirs = step_errors(BitsandbytesAdamW(shape, weight_decay=0.0), shape, torch.float32, weight_decay=0.0)
    assert 0 < ours.direction < theirs.direction


def test_the_dynamic_map_is_the_formula_of_bitsandbytes():
    """The order of operations differs in the last bit, so that few values fall on the other side of an edge."""
    shape, generator = (64, BLOCK), torch.Generator().manual_seed(0)
    ours, theirs = own(shape, map="dynamic", stochastic=False), BitsandbytesAdamW(shape, weight_decay=0.0)
    left, right = torch.zeros(shape), torch.zeros(shape)
    for step in range(1, 6):
        gradient = torch.randn(shape, generator=generator) * 0.01
        ours.update(left, gradient, step)
        theirs.update(right, gradient, step)
    signed, unsigned = (codes.long().view(-1, BLOCK) for codes in ours.codes)
    assert ((signed + 128) != theirs.states[0][0]).double().mean() < 1e-3
    assert (unsigned != theirs.states[1][0]).double().mean() < 1e-3


def test_the_error_of_a_linear_map_is_seen():
    """What the tests above measure can fail: a linear map loses small second moments."""
    shape = (1024, 32)
    linear = step_errors(own(shape, map="linear", stochastic=False), shape, torch.float32, weight_decay=0.0)
    companded = step_errors(own(shape, stochastic=False), shape, torch.float32, weight_decay=0.0)
    assert linear.direction > 3 * companded.direction


@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "unsigned"])
def test_the_package_has_the_map_that_it_is_compared_by(is_signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(functional.create_dynamic_map(signed=is_signed), dynamic_map(is_signed=is_signed))


@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "unsigned"])
def test_the_package_encodes_as_the_formula_that_it_is_compared_by(is_signed):
    """On a CPU it looks codes up in steps of 2^-15 of the scale, so that it may miss the nearest by as much."""
    pytest.importorskip("bitsandbytes")
    values = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(0))
    table, values = dynamic_map(is_signed=is_signed), values if is_signed else values.square()
    found, scales = torch.ops.bitsandbytes.quantize_blockwise(values.flatten(), table, BLOCK)
    expected, expected_scales = quantized(values, table)
    assert torch.equal(scales.flatten(), expected_scales)
    ratio = values / expected_scales[:, None]
    excess = (table[found.long().view_as(expected)] - ratio).abs() - (table[expected] - ratio).abs()
    assert 0 <= excess.max() <= 2**-15


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_as_exact_as_that_of_the_package_and_its_moments_lose_less(dtype):
    pytest.importorskip("bitsandbytes")
    shape = (1024, 32)
    ours = step_errors(own(shape, weight_decay=0.1), shape, dtype, weight_decay=0.1)
    theirs = step_errors(PackageAdamW(weight_decay=0.1), shape, dtype, weight_decay=0.1)
    assert ours.parameter <= 1.05 * theirs.parameter + torch.finfo(torch.float32).eps * LR
    assert ours.direction < theirs.direction
