"""Counted random bits: fixed for all time, flat, and without a relation between seeds, steps and elements."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels.counter_random import Key, key_of, random_bits, uniform

CPU = torch.device("cpu")


def test_the_bits_of_a_seed_step_and_index_never_change():
    # A change of these is a change of every resumed run: give the state a new version if you must.
    assert key_of(1, 2) == Key(low=0x9673066B, high=0xBCD9DBB4)
    found = random_bits(key_of(1, 2), 2**32 - 2, 2**32 + 2, device=CPU)
    assert found.tolist() == [
        -1347605385,
        -932746968,
        -397844729,
        1056527866,
    ]


def test_a_piece_has_the_bits_of_the_whole():
    key = key_of(-3, 7)
    whole = random_bits(key, 0, 1000, device=CPU)
    assert torch.equal(random_bits(key, 123, 456, device=CPU), whole[123:456])


def test_draws_are_flat():
    draws = uniform(random_bits(key_of(0, 1), 0, 1 << 18, device=CPU))
    counts = torch.histc(draws, bins=64, min=0, max=1)
    # Chi square with 63 degrees of freedom: 63 on average, standard deviation 11.2; six of them.
    assert ((counts - 4096) ** 2 / 4096).sum() < 63 + 6 * 11.2
    assert draws.min() >= 0.0 and draws.max() < 1.0


@pytest.mark.parametrize("other", [(0, 2), (1, 1), (2**40, 1), (-1, 1)])
def test_other_seeds_and_steps_are_independent(other):
    num_draws = 1 << 16
    one = uniform(random_bits(key_of(0, 1), 0, num_draws, device=CPU)) - 0.5
    another = uniform(random_bits(key_of(*other), 0, num_draws, device=CPU)) - 0.5
    for shift in (0, 1, 2, 1024):
        correlation = (one * another.roll(shift)).mean() * 12
        assert correlation.abs() < 5 / num_draws**0.5


def test_neighbours_and_the_two_halves_of_a_draw_are_independent():
    bits = random_bits(key_of(5, 1), 0, 1 << 16, device=CPU)
    upper, lower = uniform(bits) - 0.5, (bits & 0xFFFF) * 2.0**-16 - 0.5
    for one, another in ((upper, lower), (upper, upper.roll(1)), (upper, upper.roll(256)), (lower, lower.roll(1))):
        assert ((one * another).mean() * 12).abs() < 5 / 256
