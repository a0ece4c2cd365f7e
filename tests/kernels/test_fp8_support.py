"""What each kind of device can do with FP8."""

from __future__ import annotations

import pytest
import torch

from graphopt.kernels.fp8_support import support_of, support_on


@pytest.mark.parametrize(
    ("capability", "has_fp8", "needs_two_layouts", "has_tma"),
    [
        ((7, 5), False, False, False),
        ((8, 0), False, False, False),
        ((8, 6), False, False, False),
        ((8, 9), True, True, False),
        ((9, 0), True, True, True),
        ((10, 0), True, False, True),
        ((10, 3), True, False, True),
        ((12, 0), True, True, True),
    ],
)
def test_support_follows_the_compute_capability(capability, has_fp8, needs_two_layouts, has_tma):
    support = support_of(capability)
    assert (support.has_fp8, support.needs_two_layouts, support.has_tma) == (has_fp8, needs_two_layouts, has_tma)
    assert not support.is_emulated


def test_a_device_without_fp8_says_what_is_needed():
    assert support_of((8, 0)).reason == (
        "no FP8 here: sm_80 has no FP8 matrix unit, compute capability 8.9 or newer needed"
    )
    assert support_of((9, 0)).reason == ""


def test_a_cpu_emulates_and_says_so():
    support = support_on(torch.device("cpu"))
    assert support == support_of(None)
    assert support.has_fp8 and support.is_emulated and not support.needs_two_layouts


def test_a_device_that_is_neither_cpu_nor_cuda_has_none():
    support = support_on(torch.device("meta"))
    assert not support.has_fp8
    assert "meta" in support.reason
