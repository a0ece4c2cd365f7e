"""Runs the FP8 cast kernels in Triton's interpreter against the reference; a program, since Triton decides at import.

``python -m tests.support.interpreted_casts`` prints one JSON object: for each case how many numbers differ, and the
bytes that the kernels move beside those that must move.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from graphopt.kernels import fp8_compiled, fp8_dequantize_triton, fp8_launch_triton
from graphopt.kernels.fp8_cast import FLOATS, quantize, quantize_both, quantize_delayed, quantize_delayed_both
from graphopt.kernels.fp8_format import FORMATS, GRIDS, Cast, Grid, decode, encode, format_named
from tests.support.casts import cast_bytes, laid_out, matrix, num_different, reference
from tests.support.counted_bytes import counted_bytes

# Of one tile or two, since an interpreted tile takes 10 milliseconds; and of four.
SHAPES = ((129, 7), (7, 129), (1, 123), (129, 130))
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, where Triton runs
LAYOUTS = ("rows", "columns", "neither")


def run_interpreted() -> None:
    """Has the casts of CPU tensors done by the Triton kernels."""

    def fill(x: Tensor, casts: Sequence[Cast], *, power_of_two: bool) -> bool:
        fp8_launch_triton.fill(x, casts, power_of_two=power_of_two)
        return True

    def fill_at_given_scale(x: Tensor, casts: Sequence[Cast], amax: Tensor) -> bool:
        amax.copy_(fp8_launch_triton.fill_at_given_scale(x, casts).reshape(()))
        return True

    fp8_compiled.fill, fp8_compiled.fill_at_given_scale = fill, fill_at_given_scale


def cast_cases() -> Iterator[tuple[str, int]]:
    """Each grid of codes and each of the transpose meet in one cast; dtypes, formats and layouts take turns."""
    for number, (grid, grid_t) in enumerate(product(GRIDS, GRIDS)):
        for num_rows, num_columns in (SHAPES[number % 2], SHAPES[2 + (number % 7 == 0)]):
            dtype, layout = FLOATS[number % 3], LAYOUTS[number // 3 % 3]
            format, power_of_two = tuple(FORMATS)[number % 2], number // 2 % 2 == 0
            x = laid_out(matrix(num_rows, num_columns, dtype), layout)
            found = quantize_both(x, format, grid, grid_t, power_of_two=power_of_two)
            expected = (
                *reference(x, format, grid, power_of_two=power_of_two),
                *reference(x.t(), format, grid_t, power_of_two=power_of_two),
            )
            name = f"{num_rows}x{num_columns} {dtype} {layout} {format} {grid} {grid_t} {power_of_two}"
            yield name, num_different(found, expected)


def single_cases() -> Iterator[tuple[str, int]]:
    """One layout of codes takes other tiles."""
    for number, grid in enumerate(GRIDS):
        for format in tuple(FORMATS)[number % 2 :: 2]:
            x = matrix(129 if 128 in grid else 35, 129, FLOATS[number % 3])
            found, expected = quantize(x, format, grid, power_of_two=False), reference(x, format, grid)
            yield f"only {grid} {format}", num_different(found, expected)
            turned = quantize(x.t(), format, grid, power_of_two=True)
            yield (
                f"only turned {grid} {format}",
                num_different(turned, reference(x.t(), format, grid, power_of_two=True)),
            )
            back = fp8_dequantize_triton.dequantize(*expected, grid, FLOATS[number % 3])
            yield f"back {grid} {format}", num_different([back], [decode(*expected, grid).to(FLOATS[number % 3])])
    longest, fp8_launch_triton.LONGEST_ROW_IN_A_TILE = fp8_launch_triton.LONGEST_ROW_IN_A_TILE, 64
    long_rows = matrix(7, 129, torch.bfloat16)
    found, expected = quantize(long_rows, "e4m3", (1, 0), power_of_two=False), reference(long_rows, "e4m3", (1, 0))
    fp8_launch_triton.LONGEST_ROW_IN_A_TILE = longest
    yield "rows too long for a tile", num_different(found, expected)
    turned = expected[0].t()
    yield (
        "back from columns",
        num_different(
            [fp8_dequantize_triton.dequantize(turned, expected[1].t(), (0, 1), torch.float32)],
            [decode(*expected, (1, 0)).t()],
        ),
    )


def delayed_cases() -> Iterator[tuple[str, int]]:
    for format in FORMATS:
        for value in (1.0, float("inf"), float("nan")):
            for scale in (0.01, float("nan")):
                x = torch.randn(35, 140).bfloat16() * 10
                x[34, 3] = value
                given = torch.full((1, 1), scale)
                codes = encode(x, given, (0, 0), format_named(format)).contiguous()
                amax = x.abs().amax().float()
                name = f"delayed {format} {value} at {scale}"
                yield name, num_different(quantize_delayed(x, given, format), (codes, amax))
                both = (codes, codes.t().contiguous(), amax)
                yield f"{name} both", num_different(quantize_delayed_both(x, given, format), both)


def every_number_cases() -> Iterator[tuple[str, int]]:
    """All bfloat16, and all codes."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    codes = torch.arange(256).to(torch.uint8).reshape(2, 128)
    for format, kind in FORMATS.items():
        given = torch.ones(1, 1)
        found, _ = quantize_delayed(numbers, given, format)
        yield f"every bfloat16 {format}", num_different([found], [encode(numbers, given, (0, 0), kind).contiguous()])
        back = fp8_dequantize_triton.dequantize(codes.view(kind.dtype), given, (0, 0), torch.float32)
        yield f"every code {format}", num_different([back], [codes.view(kind.dtype).float()])


def far_offset_cases() -> Iterator[tuple[str, int]]:
    """Rows so far apart that the last lie beyond 2^31 elements; only the pages that are touched take memory."""
    num_rows, stride = 130, 1 << 24

    def far_apart(dtype: torch.dtype) -> Tensor:
        memory = mmap.mmap(
            -1, num_rows * stride * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        )
        return torch.frombuffer(memory, dtype=dtype).as_strided((num_rows, 16), (stride, 1))

    x, codes = far_apart(torch.bfloat16), far_apart(torch.uint8)
    x.copy_(torch.randn(num_rows, 16))
    expected = reference(x, "e4m3", (1, 0))
    cast = Cast(codes.view(torch.float8_e4m3fn), torch.empty(num_rows, 1), (1, 0))
    fp8_launch_triton.fill(x, [cast], power_of_two=False)
    yield "rows beyond 32 bits", num_different([cast.codes.contiguous(), cast.scale], expected)
    back = fp8_dequantize_triton.dequantize(cast.codes, cast.scale, (1, 0), torch.float32)
    yield "back from beyond 32 bits", num_different([back], [decode(*expected, (1, 0))])


def moved_bytes() -> Iterator[tuple[str, tuple[int, int]]]:
    """What is moved and what must be, for a matrix of whole tiles."""
    x = torch.randn(256, 256).bfloat16()
    for grid in GRIDS:
        with counted_bytes() as moved:
            quantize(x, "e4m3", grid, power_of_two=False)
        yield f"{grid}", (moved.num_bytes, _must_move(x, grid))
        with counted_bytes() as moved:
            quantize_both(x, "e4m3", grid, grid, power_of_two=False)
        yield f"{grid} both", (moved.num_bytes, _must_move(x, grid, grid[::-1]))
    with counted_bytes() as moved:
        quantize_delayed_both(x, torch.ones(1, 1), "e4m3")
    yield "delayed both", (moved.num_bytes, x.numel() * 4 + 8)


def _must_move(x: Tensor, *grids: Grid) -> int:
    return cast_bytes(x.shape, x.element_size(), grids)


def main() -> None:
    torch.manual_seed(0)
    run_interpreted()
    different = dict([*cast_cases(), *single_cases(), *delayed_cases(), *every_number_cases(), *far_offset_cases()])
    json.dump({"different": different, "moved": dict(moved_bytes())}, sys.stdout)


if __name__ == "__main__":
    main()
