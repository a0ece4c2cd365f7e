"""Runs the Triton kernels of FP8 products in Triton's interpreter; a program, since Triton decides at import.

``python -m tests.support.interpreted_products`` prints one JSON object: for each case by how many decibels the result
exceeds its difference from the reference in float64 (null: equal), or whether what the case names holds.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as pairs

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from graphopt.kernels.fp8_matmul_launch import lay, multiply
from graphopt.kernels.fp8_matmul_tiles import Tile
from graphopt.kernels.fp8_product import Operand, Product, reference
from graphopt.kernels.fp8_support import support_of
from tests.support.fp8_products import FORMATS, GRIDS, decibels, product_of, random_product

ADA, HOPPER, BLACKWELL = (support_of(capability) for capability in ((8, 9), (9, 0), (10, 0)))
# Fewer than the tiles of most cases: programs walk over several.
NUM_PROGRAMS = 3
TILE = Tile(64, 64, 128, 4, 3)
ODD_SHAPES = ((1, 129, 257), (7, 1, 123), (123, 257, 1), (129, 7, 129), (257, 123, 7))


def multiplied(product: Product, support=HOPPER, tile: Tile = TILE) -> Tensor:
    return multiply(product, tile, support, num_programs=NUM_PROGRAMS)


def similarity(product: Product, support=HOPPER, tile: Tile = TILE) -> float | None:
    found = multiplied(product, support, tile)
    assert found.dtype == product.dtype and found.is_contiguous()
    similar = decibels(expected(product), found)
    return None if math.isinf(similar) else similar


def expected(product: Product) -> Tensor:
    """The reference; in bfloat16 rounded toward zero, as the interpreter does. (GPUs round to nearest: see the PTX.)"""
    if product.dtype != torch.bfloat16:
        return reference(product)
    words = reference(replace(product, dtype=torch.float32)).view(torch.int32)
    return (words & ~0xFFFF).view(torch.float32)


def strided(operand: Operand) -> Operand:
    """The same [size, K] with neither dimension contiguous in codes or scales."""
    parts = (operand.codes.view(torch.uint8), operand.scale)
    codes, scale = (torch.stack((part, part), dim=2)[:, :, 0] for part in parts)
    return Operand(codes.view(operand.codes.dtype), scale, operand.grid)


def number_cases() -> Iterator[tuple[str, float | None]]:
    for (name, grids), (m, n, k) in pairs(GRIDS.items(), ODD_SHAPES):
        product = random_product(m, n, k, grids, bias=torch.randn(n))
        yield f"{name} {m}x{n}x{k} by descriptors", similarity(product)
        yield f"{name} {m}x{n}x{k} by pointers", similarity(product, ADA)
    for name, formats in pairs(GRIDS, FORMATS[1:]):
        yield f"{name} {formats}", similarity(random_product(65, 33, 300, GRIDS[name], formats))
    for dtype in (torch.bfloat16, torch.float16):
        product = random_product(65, 64, 144, bias=torch.randn(64).to(dtype), dtype=dtype)
        yield f"stored as {dtype} by descriptors", similarity(product)
        yield f"stored as {dtype} by pointers", similarity(product, ADA)
    for grids in (((0, 0), (128, 1)), ((128, 128), (0, 0)), ((128, 128), (128, 1))):
        yield f"grids {grids}", similarity(random_product(130, 140, 260, grids))
    for tile in (Tile(16, 32, 256, 4, 3), Tile(128, 32, 64, 4, 3, flatten=True)):
        yield f"tiles of {tile}", similarity(random_product(129, 70, 300, GRIDS["rowwise"]), tile=tile)


def layout_cases() -> Iterator[tuple[str, float | bool | None]]:
    """Operands that lie in every way, on a device that reads both orders and on one that needs copies."""
    for name in ("rowwise", "blockwise"):
        product = random_product(80, 48, 144, GRIDS[name])
        a = product.a
        column_major = Operand(a.codes.t().contiguous().t(), a.scale, a.grid)
        row_major = replace(product.b, codes=product.b.codes.contiguous())
        both = replace(product, a=column_major, b=row_major)
        yield f"{name} contraction not contiguous, read so", similarity(both, BLACKWELL)
        yield f"{name} contraction not contiguous, copied", similarity(both, HOPPER)
        yield f"{name} a alone", similarity(replace(product, a=column_major), BLACKWELL)
        odd = replace(product, a=strided(a), b=strided(product.b.transpose).transpose)
        yield f"{name} nothing contiguous", similarity(odd, BLACKWELL)
        yield (
            f"{name} copies",
            [
                lay(operand, support).is_copy
                for operand in (a, column_major, odd.a)
                for support in (ADA, HOPPER, BLACKWELL)
            ]
            == [False, False, False, True, True, False, True, True, True],
        )
    askew = random_product(80, 48, 145)
    views = replace(askew, a=Operand(askew.a.codes[:, 1:], askew.a.scale, askew.a.grid))
    views = replace(views, b=Operand(askew.b.codes[1:], askew.b.scale, askew.b.grid))
    yield "askew in memory", similarity(views, ADA)


def edge_cases() -> Iterator[tuple[str, bool]]:
    a, b = torch.randn(70, 260), torch.randn(260, 40)
    one_zero, infinite = a.clone(), a.clone()
    one_zero[3], infinite[5, 7] = 0, torch.inf
    for name in ("rowwise", "blockwise"):
        full, zero, bad = (multiplied(product_of(x, b, GRIDS[name])) for x in (a, one_zero, infinite))
        others = torch.arange(70) != 3
        yield f"{name}: a row of zeros changes no other", not zero[3].any() and torch.equal(full[others], zero[others])
        rows = bad.isnan().any(dim=1)
        yield f"{name}: NaN in its row alone", bool(bad[5].isnan().all()) and int(rows.sum()) == 1
    yield "tensorwise: NaN everywhere", bool(multiplied(product_of(infinite, b * 0)).isnan().all())


def main() -> None:
    torch.manual_seed(0)
    json.dump(dict([*number_cases(), *layout_cases(), *edge_cases()]), sys.stdout)


if __name__ == "__main__":
    main()
