"""Peaks of a training step in bf16 and in FP8, where activations make them and where parameters do.

``python -m benchmarks.fp8_peaks [--width 128] [--tokens 4096,256,16]``

Three residual feed-forward blocks with biases, ``width`` and four times as many features, AdamW, every product of the
blocks in FP8. Peaks are above what rests between steps: as the allocator's events show them, and as planned without
what operators allocate inside themselves, which on a CPU is mostly the emulation of FP8.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import nn

import graphopt
from benchmarks.command import Results, console, run_command
from benchmarks.fp8_peaks_table import PeakFigures, peaks_table
from benchmarks.machine import this_machine
from benchmarks.memory_settings import split_list
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from graphopt.errors import DataError
from graphopt.execute.measure import measure_memory
from graphopt.fp8 import RECIPES
from graphopt.ir.liveness import plan_memory
from graphopt.precision import Precision

BLOCKS = 3
_WARM_UP_STEPS = 2


class FeedForwards(nn.Module):
    """Residual feed-forward blocks; x f32[T,D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean square of the last block's result."""
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def precisions() -> dict[str, Precision]:
    """By name: bf16, every recipe, and one that keeps nothing in FP8."""
    chosen = {"include": ("layers.*",)}
    found = {"bf16": Precision(compute="bf16")}
    found |= {name: Precision(compute="fp8", fp8=make(**chosen)) for name, make in RECIPES.items()}
    unsaved = RECIPES["tensorwise"](saved="none", **chosen)  # type: ignore[arg-type]
    found["tensorwise, saved=none"] = Precision(compute="fp8", fp8=unsaved)
    return found


def measure(width: int, tokens: int, name: str, precision: Precision) -> PeakFigures:
    """The peak of a step that has run before."""
    model = FeedForwards(width)
    step: Any = graphopt.compile(
        model, outputs=["loss"], optimizer=graphopt.optim.AdamW(lr=1e-3), precision=precision, backend="aten"
    )
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    for _ in range(_WARM_UP_STEPS):
        step(x=x)
    gc.collect()
    measured = measure_memory(lambda: step(x=x)).peak_bytes
    return PeakFigures(name, tokens, measured, plan_memory(step.program).peak_bytes)


def measure_rows(width: int, tokens: Sequence[int]) -> Iterator[Row[PeakFigures]]:
    """A row for each number of tokens and precision."""
    machine = this_machine()
    size = sum(parameter.numel() for parameter in FeedForwards(width).parameters())
    subject = Subject(f"feed-forward-{width}x{BLOCKS}", size, f"x f32[tokens,{width}]", ("loss",))
    for count in tokens:
        for name, precision in precisions().items():
            yield Row(subject, machine, measure(width, count, name, precision))


def chosen_tokens(text: str) -> tuple[int, ...]:
    """The numbers of a list such as ``256,16``."""
    try:
        found = tuple(int(part) for part in split_list(text))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise DataError(f"--tokens expects numbers with commas, at least 1 each, such as 256,16; came {text!r}")
    return found


def main(
    width: Annotated[int, typer.Option(min=16, help="Features of what flows; blocks have four times as many.")] = 128,
    tokens: Annotated[str, typer.Option(help="Rows of a batch, with commas.")] = "4096,256,16",
    results: Results = RESULTS,
) -> None:
    """Measure the peaks of a training step in bf16 and in FP8."""
    path = results / f"fp8-peaks-{width}.jsonl"
    console().print(peaks_table(tuple(store_rows(path, measure_rows(width, chosen_tokens(tokens))))))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
