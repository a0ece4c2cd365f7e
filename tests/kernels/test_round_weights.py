"""Narrow weights: stochastic rounding is unbiased and keeps what is not finite; a split and a join lose nothing."""

from __future__ import annotations

import torch

from graphopt.kernels.round_weights import join_remainder, round_stochastically, split_remainder


def all_kinds_of_floats():
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1e-45, 3.4028235e38, torch.inf, -torch.inf])
    return torch.cat((bits.view(torch.float32), special))


def test_rounding_gives_a_neighbour_and_leaves_what_fits():
    values = all_kinds_of_floats()
    values = values[values.abs() < 3e38]
    found = round_stochastically(values, seed=1, step=1, offset=0).float()
    down = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    up = (down.view(torch.int32) + 0x10000).view(torch.float32)
    assert ((found == down) | ((found == up) & (values != down))).all()


def test_rounding_is_unbiased():
    value = 1.0 + 0.3 * 2**-7
    found = round_stochastically(torch.full((1 << 16,), value), seed=1, step=1, offset=0).double()
    # 65536 draws with standard deviation 0.46 steps of 2^-7: five of the mean's.
    assert abs(found.mean() - value) < 5 * 0.46 * 2**-7 / 256


def test_what_is_not_finite_stays():
    values = torch.tensor([torch.inf, -torch.inf, torch.nan])
    found = round_stochastically(values, seed=1, step=1, offset=0).float()
    torch.testing.assert_close(found, values, equal_nan=True)


def test_the_layout_is_kept_and_the_offset_continues_it():
    values = torch.randn(6, 50).t()
    whole = round_stochastically(values, seed=1, step=1, offset=0)
    assert whole.stride() == values.stride()
    flat = values.t().reshape(-1)
    second = round_stochastically(flat[100:], seed=1, step=1, offset=100)
    assert torch.equal(whole.t().reshape(-1)[100:], second)


def test_a_split_is_joined_bit_for_bit():
    values = all_kinds_of_floats()
    joined = join_remainder(*split_remainder(values))
    is_number = ~values.isnan()
    assert torch.equal(joined.view(torch.int32)[is_number], values.view(torch.int32)[is_number])
    assert joined[~is_number].isnan().all()


def test_the_weight_of_a_split_is_the_nearest():
    values = all_kinds_of_floats()
    weight, _ = split_remainder(values)
    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    torch.testing.assert_close(weight[~is_tie], values.bfloat16()[~is_tie], rtol=0, atol=0, equal_nan=True)
