"""Runs the Triton kernels in Triton's interpreter against the references; a program, since Triton decides at import.

``python -m tests.support.interpreted_kernels`` prints one JSON object: for each case how many values differ, and
the bytes that the kernels' loads and stores touch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from graphopt.kernels import block_adam, block_adam_triton, block_lion, block_lion_triton, block_quantize_triton
from graphopt.kernels.block_maps import MAPS
from graphopt.kernels.block_quantize import Draw, dequantize_reference, quantize_reference
from graphopt.kernels.block_update import BlockItem, BlockOptions, Moment, flat_items
from graphopt.kernels.counter_random import key_of
from tests.support.blocks import adam_scalars, copy_of, item_of, lion_scalars, options, written
from tests.support.counted_bytes import counted_bytes

KERNELS: dict[str, tuple[Any, Any, Any, int]] = {
    "adam": (block_adam, block_adam_triton, adam_scalars, 2),
    "lion": (block_lion, block_lion_triton, lion_scalars, 1),
}
NUM_COUNTED = 4 * 1024
SIZES = (1, 7, 123, 255, 256, 257, 4095, 4097)
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def num_different(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    pairs = zip(found, expected, strict=True)
    return sum(int(((one != other) & ~(one.isnan() & other.isnan())).sum()) for one, other in pairs)


def compare(
    kernel: str, items: Sequence[BlockItem], choices: BlockOptions, *, factor: float | None = 0.7, **changed: float
) -> int:
    """How many of the values that a step writes differ from the reference's."""
    reference, interpreted, scalars_of, _ = KERNELS[kernel]
    expected = [copy_of(item) for item in items]
    scale = None if factor is None else torch.tensor(factor)
    scalars = scalars_of(3, **changed)
    reference.reference_(expected, scalars, choices, factor=scale, step=3)
    interpreted.update_(flat_items(items, choices, 3), scalars, choices, scale)
    return sum(num_different(written(one), written(other)) for one, other in zip(items, expected, strict=True))


def item(
    size: int, dtypes: tuple[torch.dtype, torch.dtype] = (FLOAT32, FLOAT32), *, kernel: str = "adam", block: int = 256
) -> BlockItem:
    """A parameter in the middle of training; its random numbers cross the end of a word."""
    parameter, gradient = torch.randn(size).to(dtypes[0]), (torch.randn(size) * 1e-2).to(dtypes[1])
    moments = (
        quantize_reference(torch.randn(size) * 1e-2, block=block, map=MAPS[0], is_signed=True),
        quantize_reference((torch.randn(size) * 1e-2).square(), block=block, map=MAPS[0], is_signed=False),
    )
    return BlockItem(parameter, gradient, moments[: KERNELS[kernel][3]], seed=5, offset=2**32 - 300)


def update_cases() -> Iterator[tuple[str, int]]:
    for kernel, map in [*product(["adam"], MAPS), ("lion", MAPS[0])]:  # Lion decodes and encodes as Adam does
        items = [item(size, kernel=kernel) for size in SIZES]
        yield f"{kernel} {map} odd sizes", compare(kernel, items, options(map=map, stochastic_state=True))
        mixed = list(product((FLOAT32, BFLOAT16), (FLOAT32, BFLOAT16, FLOAT16)))
        items = [item(300, dtypes, kernel=kernel) for dtypes in mixed]
        choices = options(map=map, decoupled=False, stochastic_weight=True)
        yield f"{kernel} {map} mixed dtypes, drawn weights", compare(kernel, items, choices)
    for kernel in KERNELS:
        items = [item(1025, (dtype, FLOAT16), kernel=kernel) for dtype in (FLOAT16, BFLOAT16)]
        yield f"{kernel} narrow to nearest", compare(kernel, items, options(), factor=None)
        yield f"{kernel} factor inf", compare(kernel, [item(300, kernel=kernel)], options(), factor=float("inf"))
        yield f"{kernel} factor nan", compare(kernel, [item(300, kernel=kernel)], options(), factor=float("nan"))
        for block in (1, 32, 100, 2048):
            found = compare(kernel, [item(4097, kernel=kernel, block=block)], options(block=block))
            yield f"{kernel} block {block}", found
        yield f"{kernel} nothing at all", compare(kernel, [item(0, kernel=kernel)], options())


def edge_cases() -> Iterator[tuple[str, int]]:
    for value in (0.0, 1e-40, 1e-20, 3e18, float("inf"), float("nan")):
        gradient = torch.randn(600) * value
        gradient[:256] = value
        items = [item_of(torch.randn(600), gradient)]
        yield f"gradient {value}", compare("adam", items, options(stochastic_state=True))
    yield "no eps, padding", compare("adam", [item(300)], options(), eps=0.0)
    dense = torch.randn(6, 5, 70)
    items = [item_of(dense.permute(2, 0, 1), torch.randn(70, 6, 5)), item_of(torch.randn(()), torch.randn(()))]
    yield "permuted and 0-dim", compare("adam", items, options())
    askew = item_of(torch.randn(4100)[1:], torch.randn(4100)[1:])
    yield "askew in memory", compare("adam", [askew], options())


def quantize_cases() -> Iterator[tuple[str, int]]:
    for map, is_signed, block in product(MAPS, (True, False), (256, 100)):
        values = torch.randn(4097) if is_signed else torch.randn(4097).square()
        for draw in (None, Draw(seed=3, step=2, offset=5)) if not is_signed else (None,):
            expected = quantize_reference(values, block=block, map=map, is_signed=is_signed, draw=draw)
            found = Moment(torch.zeros_like(expected.codes), torch.zeros_like(expected.scales))
            key = None if draw is None else (key_of(draw.seed, draw.step), draw.offset)
            block_quantize_triton.quantize(values, found, block, map, key)
            back = torch.zeros_like(values)
            block_quantize_triton.dequantize(expected, back, block, map)
            pairs = [found.codes, found.scales, back]
            decoded = dequantize_reference(expected, block=block, map=map)
            different = num_different(pairs, [expected.codes, expected.scales, decoded])
            yield f"quantize {map} signed={is_signed} block={block} drawn={draw is not None}", different


def count_bytes(kernel: str, dtype: torch.dtype) -> int:
    """Bytes that one update of NUM_COUNTED elements loads and stores, tables and scalars each time they are read."""
    _, interpreted, scalars_of, _ = KERNELS[kernel]
    items = flat_items([item(NUM_COUNTED, (dtype, dtype), kernel=kernel)], options(), 1)
    with counted_bytes() as moved:
        interpreted.update_(items, scalars_of(1), options(), None)
    return moved.num_bytes


def main() -> None:
    torch.manual_seed(0)
    different = dict([*update_cases(), *edge_cases(), *quantize_cases()])
    moved = {f"{kernel} {dtype}": count_bytes(kernel, dtype) for kernel in KERNELS for dtype in (FLOAT32, BFLOAT16)}
    json.dump({"different": different, "moved": moved, "num_elements": NUM_COUNTED}, sys.stdout)


if __name__ == "__main__":
    main()
