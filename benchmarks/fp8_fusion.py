"""What makes FP8 codes, with its producer: operator by operator, and compiled into one region. Bytes and seconds.

``python -m benchmarks.fp8_fusion [--rounds N] [--shapes 512x1408,...]``; a shape is rows x columns of the quantized
matrix, which is bfloat16. Bytes are those above the inputs, codes and scales included. Seconds are of interleaved
rounds; the table shows the fastest, because what else runs on a machine only adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.command import Results, Rounds, console, run_command, seed_weights
from benchmarks.machine import this_machine
from benchmarks.measure import interleaved_seconds
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from graphopt.capture.trace import trace_function
from graphopt.errors import DataError
from graphopt.execute.executable import build_executable
from graphopt.execute.lower_regions import lower_regions
from graphopt.execute.measure import measure_memory
from graphopt.ir.program import Program
from graphopt.operators.fp8 import QUANTIZE
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline

SHAPES = "512x1408"
_DEFAULT_ROUNDS = 15
_FORMAT = "e4m3"
_GRIDS = {"one scale": (0, 0), "a scale for 1 x 128": (1, 128)}


@dataclass(frozen=True)
class Fp8FusionFigures:
    """One producer and one grid: the peak above the inputs, and seconds round by round, of both ways.

    ``codes_bytes``: of codes and scales, below which no peak can be. ``unequal``: codes that differ, of all.
    """

    producer: str
    grid: str
    codes_bytes: int
    aten_peak_bytes: int
    fused_peak_bytes: int
    aten_seconds: tuple[float, ...]
    fused_seconds: tuple[float, ...]
    unequal: float


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """What the last product of a gated feed-forward layer reads."""
    return F.silu(gate) * up


def gelu(x: Tensor, _: Tensor) -> Tensor:
    """What the last product of a plain feed-forward layer reads."""
    return F.gelu(x)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers writes it, in mixed precision."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight[0].float() * wide.bfloat16()).bfloat16()


def gated_gradient(gradient: Tensor, gate: Tensor) -> Tensor:
    """What the gradient products of the gate read."""
    return torch.ops.aten.silu_backward.default(gradient * gate, gate)


PRODUCERS = {
    "silu(gate) * up": gated,
    "gelu": gelu,
    "RMS normalisation": rms_norm,
    "gradient of silu": gated_gradient,
}


def measure_shape(shape: str, rounds: int) -> Iterator[Row[Fp8FusionFigures]]:
    """A row for each producer and grid."""
    try:
        num_rows, num_columns = (int(size) for size in shape.split("x"))
    except ValueError as error:
        raise DataError(f"a shape is rows x columns such as {SHAPES.split(',')[0]}, came {shape!r}") from error
    seed_weights()
    inputs = tuple(torch.randn(num_rows, num_columns).bfloat16() for _ in range(2))
    subject = Subject(shape, 0, f"bf16[{num_rows},{num_columns}]", ("codes", "scale"))
    for producer, function in PRODUCERS.items():
        for grid in _GRIDS:
            yield Row(subject, this_machine(), _measured(producer, function, grid, inputs, rounds))


def _measured(
    producer: str, function: Callable[..., Tensor], grid: str, inputs: tuple[Tensor, ...], rounds: int
) -> Fp8FusionFigures:
    def quantized(*operands: Tensor) -> Any:
        return QUANTIZE(function(*operands), _FORMAT, _GRIDS[grid], True)

    program = trace_function(quantized, *inputs)
    found = {"aten": Pipeline((ReuseLastUse(),)).run(program), "fused": lower_regions(program).program}
    runs = {name: _runner(own, inputs) for name, own in found.items()}
    codes, scale = runs["aten"]()
    unequal = (runs["fused"]()[0].view(torch.uint8) != codes.view(torch.uint8)).float().mean()
    peaks = {name: measure_memory(run).peak_bytes for name, run in runs.items()}
    seconds = interleaved_seconds(runs, rounds)
    return Fp8FusionFigures(
        producer,
        grid,
        codes.nbytes + scale.nbytes,
        peaks["aten"],
        peaks["fused"],
        seconds["aten"],
        seconds["fused"],
        float(unequal),
    )


def _runner(program: Program, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    executable = build_executable(program, title="fp8 fusion")

    @torch.no_grad()
    def run() -> tuple[Tensor, ...]:
        return tuple(executable.run(list(inputs)))

    return run


def fp8_fusion_table(rows: Sequence[Row[Fp8FusionFigures]]) -> Table:
    """One line for each producer and grid."""
    table = Table("producer")
    table.add_column("scales")
    for heading in ("codes", "peak", "peak fused", "fastest", "fastest fused", "of unfused", "unequal codes"):
        table.add_column(heading, justify="right")
    for figures in (row.figures for row in rows):
        aten, fused = min(figures.aten_seconds), min(figures.fused_seconds)
        table.add_row(
            figures.producer,
            figures.grid,
            bytes_cell(figures.codes_bytes),
            bytes_cell(figures.aten_peak_bytes),
            bytes_cell(figures.fused_peak_bytes),
            seconds_cell(aten),
            seconds_cell(fused),
            ratio_cell(fused, aten),
            f"{figures.unequal:.1e}",
        )
    return table


def main(
    shapes: Annotated[str, typer.Option(help="Shapes, rows x columns, with commas between.")] = SHAPES,
    rounds: Rounds = _DEFAULT_ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Measure FP8 codes made with and behind their producer."""
    for shape in shapes.split(","):
        rows = tuple(store_rows(results / f"fp8-fusion-{shape}.jsonl", measure_shape(shape, rounds)))
        console().print(shape)
        console().print(fp8_fusion_table(rows))


if __name__ == "__main__":
    run_command(main)
