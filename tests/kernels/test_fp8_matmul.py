"""FP8 products: the definition, and the emulation that a CPU runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as pairs

import pytest
import torch

from graphopt.execute.measure import measure_memory
from graphopt.kernels import fp8_matmul, fp8_matmul_cpu
from graphopt.kernels.fp8_matmul import choices_on, matmul, matmul_path
from graphopt.kernels.fp8_matmul_cpu import emulate
from graphopt.kernels.fp8_product import Operand, reference
from graphopt.kernels.fp8_support import support_of
from tests.support.fp8_products import (
    FORMATS,
    GRIDS,
    KERNEL_DECIBELS,
    VALUE_DECIBELS,
    decibels,
    product_of,
    random_product,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What the products of gradients must keep of the values: E5M2 has 2 bits after the point.
GRADIENT_DECIBELS = 17.0


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("formats", FORMATS, ids="x".join)
def test_emulation_is_the_exact_product_of_the_codes(grids, formats):
    for (m, n, k), dtype in pairs([(1, 7, 123), (129, 1, 257), (7, 129, 1), (123, 257, 129)], DTYPES):
        product = random_product(m, n, k, grids, formats, bias=torch.randn(n), dtype=dtype)
        found = matmul(product)
        assert found.dtype == dtype and found.is_contiguous()
        assert decibels(reference(product), found) >= KERNEL_DECIBELS


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("formats", FORMATS, ids="x".join)
def test_products_keep_the_values(grids, formats):
    a, b = torch.randn(256, 512), torch.randn(512, 192)
    least = VALUE_DECIBELS if formats == FORMATS[0] else GRADIENT_DECIBELS
    assert decibels(a @ b, matmul(product_of(a, b, grids, formats))) >= least


def test_one_scale_for_128_of_both_sides_and_none_along_the_other():
    for grids in [((128, 128), (128, 1)), ((0, 0), (128, 1)), ((128, 128), (0, 0))]:
        product = random_product(130, 140, 260, grids)
        assert decibels(reference(product), matmul(product)) >= KERNEL_DECIBELS


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_a_large_operand_times_a_small_one_is_finite_in_either_order(grids):
    large, small = torch.full((130, 160), 1e37), torch.full((160, 130), 1e-37)
    for a, b in ((large, small), (small.t(), large.t())):
        product = product_of(a, b, grids, FORMATS[0])
        assert decibels(reference(product), matmul(product)) >= KERNEL_DECIBELS


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_strides_do_not_matter(grids):
    product = random_product(33, 65, 200, grids)
    strided = replace(
        product,
        a=Operand(product.a.codes.t().contiguous().t(), product.a.scale.t().contiguous().t(), product.a.grid),
        b=Operand(product.b.codes.contiguous(), product.b.scale.contiguous(), product.b.grid),
    )
    assert decibels(matmul(product), matmul(strided)) >= 120


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_tiles_change_the_order_of_sums_alone(grids, monkeypatch):
    product = random_product(150, 130, 300, grids, bias=torch.randn(130))
    whole = emulate(product)
    for limit in ("LEAST_TILE", "MOST_TILE", "MOST_BLOCK_SCALED_TILE"):
        monkeypatch.setattr(fp8_matmul_cpu, limit, 64)
    # Two float32 sums of 300 terms in different orders: 24 bits less the half of log2(300), at least 115 decibels.
    assert decibels(whole, emulate(product)) >= 115


@pytest.mark.parametrize("grids", [GRIDS["rowwise"], GRIDS["blockwise"]])
def test_no_operand_is_widened_as_a_whole(grids, monkeypatch):
    monkeypatch.setattr(fp8_matmul_cpu, "PIECE_ELEMENTS", 1 << 15)
    product = random_product(256, 256, 512, grids, dtype=torch.bfloat16)
    result_bytes, pieces_bytes, tile_bytes = 256 * 256 * 2, 2 * 4 * (1 << 15), 4 * 64 * 64
    few_tiles_bytes = 4 * tile_bytes + 4096  # sums, a part of them, products of scales; the scales of a tile
    assert measure_memory(lambda: emulate(product)).peak_bytes <= result_bytes + pieces_bytes + few_tiles_bytes


@pytest.mark.parametrize(("grids", "num_tiles"), [(GRIDS["rowwise"], 1), (GRIDS["blockwise"], 2)])
def test_products_of_scales_exist_for_some_rows_at_a_time(grids, num_tiles):
    product = random_product(512, 512, 64, grids, dtype=torch.bfloat16)
    result_bytes, wide_bytes, tile_bytes = 512 * 512 * 2, 2 * 512 * 64 * 4, 512 * 512 * 4
    scales_bytes = fp8_matmul_cpu.SCALED_ROWS * 512 * 4 + 16384  # of some rows; the scales of rows and columns
    peak = measure_memory(lambda: emulate(product)).peak_bytes
    assert peak <= result_bytes + wide_bytes + num_tiles * tile_bytes + scales_bytes


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_zeros_stay_zeros_and_leave_others_alone(grids):
    a, b = torch.randn(130, 260), torch.randn(260, 40)
    one_zero = a.clone()
    one_zero[3] = 0
    full, found = (matmul(product_of(x, b, grids)) for x in (a, one_zero))
    assert not found[3].any()
    if grids[0][0] == 1:  # scales of its own: a row of zeros changes no other
        assert torch.equal(full[:3], found[:3]) and torch.equal(full[4:], found[4:])
    assert torch.equal(matmul(product_of(a * 0, b, grids)), torch.zeros(130, 40))


@pytest.mark.parametrize(("name", "bad_rows"), [("tensorwise", 130), ("rowwise", 1), ("blockwise", 1)])
def test_what_is_not_finite_reaches_all_that_it_scales(name, bad_rows):
    a = torch.randn(130, 260)
    a[5, 7] = torch.inf
    b = torch.randn(260, 40)
    b[:, 11] = 0  # zeros times NaN are NaN too
    found = matmul(product_of(a, b, GRIDS[name]))
    assert found[5].isnan().all()
    assert int(found.isnan().any(dim=1).sum()) == bad_rows


def test_an_empty_sum_is_the_bias():
    product = random_product(3, 5, 0, bias=torch.arange(5.0))
    assert torch.equal(matmul(product), torch.arange(5.0).expand(3, 5))
    for m, n in ((0, 5), (3, 0)):
        assert matmul(random_product(m, n, 16)).shape == (m, n)


def test_a_product_that_is_none_says_what_is_wrong():
    product = random_product(16, 16, 256, GRIDS["blockwise"])
    wrong = {
        "as many rows of b": replace(product, b=random_product(16, 16, 128, GRIDS["blockwise"]).b),
        "quantize it": replace(product, a=replace(product.a, codes=torch.randn(16, 256))),
        "came the grid": replace(product, a=replace(product.a, grid=(1, 64))),
        r"is float32 \[16, 2\], came": replace(product, a=replace(product.a, scale=torch.ones(16, 1))),
        "bfloat16, float16 or float32": replace(product, dtype=torch.float64),
        r"bias expects shape \[16\]": replace(product, bias=torch.zeros(15)),
        "lie on one device": replace(product, bias=torch.zeros(16, device="meta")),
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            matmul(changed)


def test_a_gpu_without_fp8_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(fp8_matmul, "support_on", lambda device: support_of((8, 0)))
    with pytest.raises(ValueError, match=r"no FP8 here: sm_80 .* 8\.9 or newer needed"):
        matmul(random_product(16, 16, 16))


def test_the_path_is_told_in_words():
    assert matmul_path(support_of(None)).startswith("emulated on the CPU")
    assert matmul_path(support_of((8, 0))).startswith("no FP8 here")
    assert "Triton" in matmul_path(support_of((9, 0)))


def test_nothing_is_chosen_by_measurement_on_a_cpu():
    matmul(random_product(16, 16, 16))
    assert choices_on(torch.device("cpu")) == ()
