"""FP8 products against bfloat16 ones at shapes of Llama models: forward, input gradient and weight gradient.

``python -m benchmarks.fp8_matmul [--shapes 8192x4096x14336] [--rounds N] [--tiny]``; a shape is M x N x K, of a product
[M,K] x [K,N].

For each shape: torch's bfloat16 product; FP8 with one scale, with a scale for each row and column, and with block
scales, by every implementation there is. Operands are quantized before the clock starts: casts are another benchmark.
On a GPU times are those of events on the stream; operands that fit stay in its L2 cache. Without a GPU the shapes are
tiny, FP8 is emulated, and rows say so: they prove that the benchmark runs, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.checks_table import checks_table
from benchmarks.command import Results, Rounds, console, run_command
from benchmarks.fp8_matmul_table import BFLOAT16_PRODUCT, ProductFigures, product_checks, product_table
from benchmarks.machine import this_machine
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from benchmarks.steps import first_line
from graphopt.errors import DataError
from graphopt.kernels.fp8_matmul import matmul_path
from graphopt.kernels.fp8_matmul_cpu import emulate
from graphopt.kernels.fp8_product import Operand, Product, reference
from graphopt.kernels.fp8_support import Fp8Support, support_on
from graphopt.operators import fp8

# Llama 3 8B: few tokens to many; q, kv, up and down projections; then weight gradients, with the tokens as contraction.
SHAPES = (
    "1x4096x4096,16x4096x4096,64x14336x4096,512x4096x4096,2048x4096x4096,2048x14336x4096,"
    "8192x1024x4096,8192x14336x4096,8192x4096x14336,16384x6144x4096,4096x4096x8192,14336x4096x16384"
)
# On a CPU every side is this much smaller; sides stay multiples of 16, which ``torch._scaled_mm`` needs.
TINY_FACTOR, TINY_MULTIPLE = 64, 16
_DEFAULT_ROUNDS = 11
# Rows and columns that are compared with float64: the whole of a large product would take longer than all else.
_COMPARED = 64
BFLOAT16 = "bf16"
GRIDS = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (0, 1)),
    "blockwise": ((1, 128), (128, 128)),
}
# A weight gradient contracts over tokens, along which both operands have their 128s.
_WEIGHT_GRADIENT_GRIDS = ((1, 128), (128, 1))

Run = Callable[[Product], Tensor]


@dataclass(frozen=True)
class Shape:
    """A product [m,k] x [k,n]."""

    m: int
    n: int
    k: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape of a text such as ``8192x4096x14336``; DataError for another."""
        try:
            m, n, k = (int(size) for size in text.split("x"))
        except ValueError as error:
            raise DataError(f"a shape is M x N x K such as 8192x4096x14336, came {text!r}") from error
        return cls(m, n, k)

    @property
    def tiny(self) -> Shape:
        """The same, for a CPU."""
        sides = (-(-side // TINY_FACTOR // TINY_MULTIPLE) * TINY_MULTIPLE for side in (self.n, self.k))
        return Shape(max(1, self.m // TINY_FACTOR), *sides)

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def measure_shape(shape: Shape, rounds: int, device: torch.device) -> Iterator[Row[ProductFigures]]:
    """The rows of a shape; what stops an implementation becomes its note."""
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(shape.m, shape.k, device=device, dtype=torch.bfloat16, generator=generator)
    b = torch.randn(shape.n, shape.k, device=device, dtype=torch.bfloat16, generator=generator).t()
    subject = Subject(str(shape), shape.n * shape.k, f"bf16[{shape.m},{shape.k}] x bf16[{shape.k},{shape.n}]", ())
    machine, path = this_machine(), _device_words(device)
    seconds = _seconds(partial(torch.mm, a, b), rounds, device)
    yield Row(subject, machine, ProductFigures(BFLOAT16, BFLOAT16_PRODUCT, path, seconds=seconds))
    support = support_on(device)
    for recipe in GRIDS:
        if not support.has_fp8:
            yield Row(subject, machine, ProductFigures(recipe, "none", path, note=support.reason))
            continue
        product = _quantized(a, b, recipe)
        for name, run in implementations(product, support).items():
            figures = _measured(ProductFigures(recipe, name, path), run, product, rounds)
            yield Row(subject, machine, figures)


def implementations(product: Product, support: Fp8Support) -> dict[str, Run]:
    """All ways to compute ``product`` on its device."""
    if not support.is_emulated:
        from graphopt.kernels.fp8_matmul_choice import candidates  # needs Triton

        return candidates(product, support)
    found: dict[str, Run] = {"emulation": emulate}
    if product.a.grid == product.b.grid == (0, 0):  # with scales of rows, torch has none on a CPU before 2.12
        found["torch._scaled_mm"] = _scaled_mm
    return found


def _scaled_mm(product: Product) -> Tensor:
    a, b = product.a, product.b
    return torch._scaled_mm(a.codes, b.codes, a.scale, b.scale, out_dtype=product.dtype)


def _quantized(a: Tensor, b: Tensor, recipe: str) -> Product:
    grids = GRIDS[recipe]
    if recipe == "blockwise" and a.shape[1] > max(a.shape[0], b.shape[1]):
        grids = _WEIGHT_GRADIENT_GRIDS
    a_grid, (b_rows, b_columns) = grids
    turned = Operand(*fp8.quantize(b.t(), "e4m3", (b_columns, b_rows), False), (b_columns, b_rows))
    return Product(Operand(*fp8.quantize(a, "e4m3", a_grid, False), a_grid), turned.transpose, None, torch.bfloat16)


def _measured(figures: ProductFigures, run: Run, product: Product, rounds: int) -> ProductFigures:
    try:
        found = run(product)
        decibels = decibels_of_a_part(product, found)
        seconds = _seconds(partial(run, product), rounds, product.device)
    except Exception as error:  # a failure is the implementation's result; the others are still to be measured
        return ProductFigures(figures.recipe, figures.implementation, figures.device, note=first_line(error))
    return ProductFigures(figures.recipe, figures.implementation, figures.device, seconds=seconds, decibels=decibels)


def decibels_of_a_part(product: Product, found: Tensor) -> float:
    """How far ``found`` is from the exact product of the codes, on some rows and columns, before it is rounded.

    A result in bfloat16 is rounded, and rounding alone leaves about 56 decibels.
    """
    rows = torch.linspace(0, product.m - 1, min(_COMPARED, product.m), device=product.device).long()
    columns = torch.linspace(0, product.n - 1, min(_COMPARED, product.n), device=product.device).long()
    part = Product(_rows(product.a, rows), _rows(product.b.transpose, columns).transpose, None, torch.float32)
    exact = reference(part).double()
    difference = exact - found[rows][:, columns].double()
    return (20 * torch.log10(exact.norm() / difference.norm())).item()


def _rows(operand: Operand, rows: Tensor) -> Operand:
    """Some rows of an operand, each with scales of its own."""
    across, along = operand.grid
    places = torch.zeros_like(rows) if across == 0 else rows // across
    codes = operand.codes.view(torch.uint8)[rows].view(operand.codes.dtype)
    return Operand(codes, operand.scale[places], (1, along))


def _seconds(run: Callable[[], Any], rounds: int, device: torch.device) -> tuple[float, ...]:
    if device.type == "cuda":
        from graphopt.kernels.fp8_matmul_choice import device_milliseconds  # needs Triton

        return tuple(milliseconds / 1e3 for milliseconds in device_milliseconds(run, rounds))
    run()
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return tuple(found)


def _device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {matmul_path(support_on(device))}"


def main(
    shapes: Annotated[str, typer.Option(help="M x N x K, with commas between.")] = SHAPES,
    rounds: Rounds = _DEFAULT_ROUNDS,
    tiny: Annotated[bool, typer.Option(help="Tiny shapes on a GPU too.")] = False,
    results: Results = RESULTS,
) -> None:
    """Measure products of operands that are quantized already."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [Shape.parse(text) for text in shapes.split(",")]
    if tiny or device.type == "cpu":
        chosen = list(dict.fromkeys(shape.tiny for shape in chosen))
    console().print(_device_words(device))
    path = results / f"fp8-matmul-{support_on(device).name}.jsonl"
    rows = tuple(store_rows(path, (row for shape in chosen for row in measure_shape(shape, rounds, device))))
    console().print(product_table(rows))
    found = tuple(product_checks(rows))
    if wrong := [check for check in found if not check.is_met]:
        console().print(checks_table([("fp8 products", wrong)]))
    console().print(f"{len(found) - len(wrong)} of {len(found)} FP8 products are right")


if __name__ == "__main__":
    run_command(main)
