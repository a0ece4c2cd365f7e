"""The kernels on the device that is there, against their references on the CPU: FP8 casts and products, INT8 updates.

``python -m benchmarks.kernel_checks``; exit 1 if any is wrong. It needs no pytest, so that it runs on a machine that
has torch and Triton alone. Casts and updates must give the reference's bits; products must keep 60 decibels of the
exact product of the codes, in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product as pairs
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.command import Results, console, run_command
from benchmarks.device import device_slug, measured_device
from benchmarks.machine import this_machine
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from benchmarks.steps import first_line
from graphopt.kernels import block_adam, block_lion, fp8_matmul
from graphopt.kernels.block_maps import MAPS
from graphopt.kernels.block_update import BlockItem, BlockOptions, Moment
from graphopt.kernels.flat_tensors import num_blocks
from graphopt.kernels.fp8_format import FORMATS, GRIDS, Grid, decode, encode, format_named, group_amax, scale_of
from graphopt.kernels.fp8_product import Operand, Product, reference
from graphopt.kernels.fp8_support import support_on
from graphopt.operators import fp8

LEAST_DECIBELS = 60.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Odd sizes, parts of blocks, one row, and more than one tile.
_CAST_SHAPES = ((129, 257), (1, 123), (300, 520))
_PRODUCT_SHAPES = ((7, 1, 123), (129, 257, 129), (256, 512, 1024), (16, 272, 400))
_PRODUCT_GRIDS: dict[str, tuple[Grid, Grid]] = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (0, 1)),
    "blockwise": ((1, 128), (128, 128)),
    "blockwise weight gradient": ((1, 128), (128, 1)),
}
_PRODUCT_FORMATS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
_UPDATE_SIZES = (1, 255, 4097, 100_003)
_BLOCK = 256
_RULES: dict[str, tuple[Any, int]] = {"adam": (block_adam, 2), "lion": (block_lion, 1)}
_MIN_ROWS_FOR_EDGES = 16
_WRONG = 1


@dataclass(frozen=True)
class KernelCheckFigures:
    """One case. ``num_different``: numbers whose bits differ; ``decibels``: of a product, from the exact one.

    ``note`` says what stopped it.
    """

    kernel: str
    case: str
    num_different: int | None = None
    decibels: float | None = None
    seconds: float = 0.0
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it ran, and gave what it must."""
        return self.num_different == 0 or (self.decibels is not None and self.decibels >= LEAST_DECIBELS)


Measured = Callable[[], int | float]


@dataclass(frozen=True)
class KernelCase:
    """A case to run: ``measure()`` gives decibels as a float, numbers that differ as an int."""

    kernel: str
    name: str
    measure: Measured


def cases(device: torch.device) -> Iterator[KernelCase]:
    """All cases, with their results on ``device``."""
    yield from _cast_cases(device)
    yield from _product_cases(device)
    yield from _update_cases(device)


def _cast_cases(device: torch.device) -> Iterator[KernelCase]:
    # Shapes, dtypes and scales take turns: a GPU compiles kernels for each case.
    for number, (grid, format) in enumerate(pairs(GRIDS, FORMATS)):
        shape, dtype, power_of_two = _CAST_SHAPES[number % 3], _DTYPES[number // 2 % 3], number // 3 % 2 == 0
        name = f"{shape[0]}x{shape[1]} {dtype} {format} {grid} {'powers of two' if power_of_two else ''}".strip()
        arguments = (shape, dtype, format, grid, power_of_two, device)
        yield KernelCase("fp8 cast", name, partial(_different_casts, *arguments))


def _different_casts(
    shape: tuple[int, int], dtype: torch.dtype, format: str, grid: Grid, power_of_two: bool, device: torch.device
) -> int:
    """Codes, codes of the transpose, codes at a given scale, and back."""
    x = _matrix(*shape).to(dtype)
    kind, moved = format_named(format), x.to(device)
    scale, scale_t = (scale_of(group_amax(y, grid), kind, power_of_two=power_of_two) for y in (x, x.t()))
    codes, codes_t = encode(x, scale, grid, kind), encode(x.t(), scale_t, grid, kind)
    one = torch.full((1, 1), 0.5)
    delayed, _ = fp8.quantize_delayed(moved, one.to(device), format)
    found = (
        *fp8.quantize_both(moved, format, grid, grid, power_of_two),
        delayed,
        fp8.dequantize(codes.to(device), scale.to(device), grid, torch.float32),
    )
    expected = (codes, scale, codes_t, scale_t, encode(x, one, (0, 0), kind), decode(codes, scale, grid))
    return _num_different(found, expected)


def _product_cases(device: torch.device) -> Iterator[KernelCase]:
    for number, ((name, grids), formats) in enumerate(pairs(_PRODUCT_GRIDS.items(), _PRODUCT_FORMATS)):
        m, n, k = _PRODUCT_SHAPES[number % 4]
        case = f"{name} {m}x{n}x{k} {formats[0]} x {formats[1]}"
        yield KernelCase("fp8 product", case, partial(_decibels, (m, n, k), grids, formats, device))


def _decibels(
    shape: tuple[int, int, int], grids: tuple[Grid, Grid], formats: tuple[str, str], device: torch.device
) -> float:
    m, n, k = shape
    a_grid, (b_rows, b_columns) = grids
    a = Operand(*fp8.quantize(_normal(m, k), formats[0], a_grid, False), a_grid)
    turned_grid = (b_columns, b_rows)
    b = Operand(*fp8.quantize(_normal(n, k), formats[1], turned_grid, False), turned_grid).transpose
    bias = _normal(1, n)[0]
    exact = reference(Product(a, b, bias, torch.float32)).double()
    moved = Product(_moved(a, device), _moved(b, device), bias.to(device), torch.float32)
    return min(_decibels_over(exact, run(moved)) for run in _implementations(moved))


def _moved(operand: Operand, device: torch.device) -> Operand:
    return Operand(operand.codes.to(device), operand.scale.to(device), operand.grid)


def _implementations(product: Product) -> Sequence[Callable[[Product], Tensor]]:
    """On a GPU all that may be chosen, not the fastest alone."""
    support = support_on(product.device)
    if support.is_emulated or not support.has_fp8:
        return (fp8_matmul.matmul,)
    from graphopt.kernels.fp8_matmul_choice import candidates  # needs Triton

    return tuple(candidates(product, support).values())


def _decibels_over(exact: Tensor, found: Tensor) -> float:
    difference = exact - found.cpu().double()
    # Equal to the last bit is 150 decibels: more than float32 can show.
    return min(150.0, (20 * torch.log10(exact.norm() / difference.norm())).item())


def _update_cases(device: torch.device) -> Iterator[KernelCase]:
    for rule, map, size, dtype in pairs(_RULES, MAPS, _UPDATE_SIZES, _DTYPES[:2]):
        case = f"{map} {size} {dtype}"
        yield KernelCase(f"block {rule}", case, partial(_different_updates, rule, map, size, dtype, device))


def _different_updates(rule: str, map: str, size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Two steps: the first from zeros, the second from codes."""
    kernel, num_moments = _RULES[rule]
    options = BlockOptions(block=_BLOCK, map=map, decoupled=True, stochastic_state=rule == "adam")
    parameter, gradient = _normal(1, size)[0].to(dtype), _normal(1, size)[0] * 1e-2
    expected, found = (_item(parameter, gradient, num_moments, place) for place in (torch.device("cpu"), device))
    for step in (1, 2):
        scalars = _scalars(rule, step)
        kernel.reference_([expected], scalars, options, factor=None, step=step)
        kernel.update_([found], scalars, options, factor=None, step=step)
    return _num_different(_written(found), _written(expected))


def _scalars(rule: str, step: int) -> Any:
    numbers = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9}
    if rule == "lion":
        return block_lion.LionScalars.of(beta2=0.99, **numbers)
    return block_adam.AdamScalars.of(beta2=0.999, eps=1e-8, step=step, **numbers)


def _item(parameter: Tensor, gradient: Tensor, num_moments: int, device: torch.device) -> BlockItem:
    blocks = num_blocks(parameter.numel(), _BLOCK)
    moments = tuple(
        Moment(torch.zeros(parameter.shape, dtype=dtype, device=device), torch.zeros(blocks, device=device))
        for dtype in (torch.int8, torch.uint8)[:num_moments]
    )
    # Copies, on the CPU too: updates write in place.
    return BlockItem(parameter.to(device, copy=True), gradient.to(device, copy=True), moments, seed=5)


def _written(item: BlockItem) -> list[Tensor]:
    return [item.parameter, *(tensor for moment in item.moments for tensor in (moment.codes, moment.scales))]


def _normal(num_rows: int, num_columns: int) -> Tensor:
    return torch.randn(num_rows, num_columns)


def _matrix(num_rows: int, num_columns: int) -> Tensor:
    """Rows of sizes that lie far apart, among them zeros, subnormal numbers, inf and NaN where there is room."""
    x = _normal(num_rows, num_columns) * (_normal(num_rows, 1) * 4).exp()
    if num_rows > _MIN_ROWS_FOR_EDGES:
        x[3] = 0.0
        for place, value in enumerate((1e-45, -1e-38, 1e38, float("inf"), float("nan"))):
            x[2 * place + 4, place] = value
    return x


def _num_different(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Numbers that differ in their bits, any NaN of a wide float counting as one."""
    return sum(_different(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def _different(found: Tensor, expected: Tensor) -> int:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return max(found.numel(), expected.numel())
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    different = found.contiguous().view(integer) != expected.contiguous().view(integer)
    if found.dtype in _DTYPES:
        different &= ~(found.isnan() & expected.isnan())
    return int(different.sum())


def check_kernels(device: torch.device) -> Iterator[Row[KernelCheckFigures]]:
    """The row of every case; what stops one becomes its note."""
    machine, subject = this_machine(), Subject(device_slug(device), 0, "", ())
    for case in cases(device):
        torch.manual_seed(0)
        figures, started = KernelCheckFigures(case.kernel, case.name), time.perf_counter()
        try:
            result = case.measure()
        except Exception as error:  # a failure is the kernel's result; the others are still to be checked
            figures = replace(figures, note=first_line(error))
        else:
            kind = "decibels" if isinstance(result, float) else "num_different"
            figures = replace(figures, **{kind: result})
        yield Row(subject, machine, replace(figures, seconds=time.perf_counter() - started))


def checks_summary(rows: Sequence[Row[KernelCheckFigures]]) -> Table:
    """One line for each kernel, and one for each case that is wrong."""
    table = Table("kernel", "cases", "right", "wrong or failed")
    for kernel in dict.fromkeys(row.figures.kernel for row in rows):
        found = [row.figures for row in rows if row.figures.kernel == kernel]
        wrong = [f"{figures.case}: {_what(figures)}" for figures in found if not figures.is_right]
        table.add_row(kernel, str(len(found)), str(len(found) - len(wrong)), "\n".join(wrong))
    return table


def _what(figures: KernelCheckFigures) -> str:
    if figures.note:
        return figures.note
    return f"{figures.num_different} differ" if figures.decibels is None else f"{figures.decibels:.1f} decibels"


def main(results: Results = RESULTS) -> None:
    """Run every kernel on this device and compare it with its reference."""
    device = measured_device()
    path = results / f"kernel-checks-{device_slug(device)}.jsonl"
    rows = tuple(store_rows(path, check_kernels(device)))
    console().print(checks_summary(rows))
    if not all(row.figures.is_right for row in rows):
        raise typer.Exit(_WRONG)


if __name__ == "__main__":
    run_command(main)
