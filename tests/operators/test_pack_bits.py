"""graphopt::pack_bits and unpack_bits: what goes in comes out, in an eighth of a byte."""

from __future__ import annotations

import pytest
import torch

from graphopt.execute.measure import measure_memory
from graphopt.operators.pack_bits import PACK_BITS, UNPACK_BITS, pack_bits, unpack_bits


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8,), (9,), (3, 41), (2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_mask_comes_back_as_it_was(shape, dtype):
    mask = torch.randint(0, 2, shape).to(dtype)
    packed = PACK_BITS(mask)
    assert packed.dtype is torch.uint8 and packed.numel() == (mask.numel() + 7) // 8
    assert torch.equal(UNPACK_BITS(packed, list(shape), dtype), mask)


def test_the_first_element_is_the_lowest_bit_and_the_rest_is_zero():
    assert PACK_BITS(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 1, 0, 1])).tolist() == [0b10000001, 0b10]


def test_elements_count_in_row_major_order_whatever_the_layout():
    mask = torch.randint(0, 2, (5, 9)).float()
    assert torch.equal(PACK_BITS(mask.t().contiguous().t()), PACK_BITS(mask))


def test_the_memory_is_an_eighth_of_a_byte_an_element_and_one_byte_while_it_runs():
    mask = torch.randint(0, 2, (8_000,)).float()
    trace = measure_memory(lambda: PACK_BITS(mask))
    assert trace.end_bytes == 1_000 and trace.peak_bytes <= 8_000 + 3 * 1_000


@pytest.mark.parametrize("shape", [(7,), (3, 8)])
def test_schema_and_fake_values_are_what_torch_demands(shape):
    mask = torch.randint(0, 2, shape).float()
    torch.library.opcheck(pack_bits, (mask,))
    torch.library.opcheck(unpack_bits, (pack_bits(mask), list(shape), torch.float32))
