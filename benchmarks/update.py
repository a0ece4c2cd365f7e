"""The optimizer's update alone, on 8.4 million float32 parameters: seconds, and bytes of state for each parameter.

``python -m benchmarks.update [--shapes 1x2048x4096,64x256x512] [--rounds N]``; a shape is tensors x rows x columns.

torch.optim.AdamW fused and in its loop, AdamW8bit of torchao and of bitsandbytes where they are installed, and
graphopt: its operator on blocks of 256 and of 2048 elements, and its compiled update, the one that ends a window of
accumulation, with state by blocks, in bf16 and in float32. All take turns in every round, each with parameters of its
own. Bytes are those of the real tensors of the state.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer

from benchmarks.checks_table import checks_table
from benchmarks.command import Results, Rounds, console, run_command
from benchmarks.machine import this_machine
from benchmarks.measure import storage_bytes
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from benchmarks.steps import first_line
from benchmarks.update_contenders import MakeUpdate, Update, update_makers
from benchmarks.update_table import UpdateFigures, update_checks, update_table
from graphopt.errors import DataError

SHAPES = "1x2048x4096,64x256x512"
_DEFAULT_ROUNDS = 11
# The first update makes the state and compiles, the second settles what is made lazily after that.
_WARM_UP_UPDATES = 2
_PARAMETER_SCALE, _GRADIENT_SCALE = 0.02, 0.001


@dataclass(frozen=True)
class UpdateShape:
    """``count`` tensors of ``rows`` x ``columns``."""

    count: int
    rows: int
    columns: int

    @classmethod
    def parse(cls, text: str) -> UpdateShape:
        """The shape of a text such as ``64x256x512``; DataError for another."""
        try:
            count, rows, columns = (int(size) for size in text.split("x"))
        except ValueError as error:
            raise DataError(f"a shape is tensors x rows x columns such as 64x256x512, came {text!r}") from error
        return cls(count, rows, columns)

    @property
    def numel(self) -> int:
        """Parameters in all."""
        return self.count * self.rows * self.columns

    def tensors(self, scale: float, *, seed: int) -> list[torch.Tensor]:
        """Normal ones of standard deviation ``scale``; the same at every call."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(self.rows, self.columns, generator=generator) * scale for _ in range(self.count)]


def measure_update(
    text: str, rounds: int, makers: Mapping[str, MakeUpdate] | None = None
) -> Iterator[Row[UpdateFigures]]:
    """The rows of a shape; whatever stops a contender becomes its note. ``makers`` None: all there are."""
    shape = UpdateShape.parse(text)
    running: dict[str, Update] = {}
    found: dict[str, UpdateFigures] = {}
    for name, make in (makers or update_makers()).items():
        try:
            running[name], found[name] = _started(UpdateFigures(name), make, shape)
        except Exception as error:  # a failure is the contender's result; the others are still to be measured
            found[name] = UpdateFigures(name, note=first_line(error))
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, update in running.items():
            seconds[name].append(_seconds(update))
    subject = Subject(text, shape.numel, f"f32[{shape.rows},{shape.columns}]", ())
    machine = this_machine()
    for name, figures in found.items():
        yield Row(subject, machine, replace(figures, seconds=tuple(seconds.get(name, ()))))


def _started(figures: UpdateFigures, make: MakeUpdate, shape: UpdateShape) -> tuple[Update, UpdateFigures]:
    update = make(shape.tensors(_PARAMETER_SCALE, seed=0), shape.tensors(_GRADIENT_SCALE, seed=1))
    first_seconds = _seconds(update)
    for _ in range(_WARM_UP_UPDATES - 1):
        _seconds(update)
    return update, replace(
        figures, first_seconds=first_seconds, state_bytes=storage_bytes(update.state()) / shape.numel
    )


def _seconds(update: Update) -> float:
    update.prepare()
    gc.collect()
    started = time.perf_counter()
    update.run()
    return time.perf_counter() - started


def main(
    shapes: Annotated[str, typer.Option(help="Tensors x rows x columns, with commas between.")] = SHAPES,
    rounds: Rounds = _DEFAULT_ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Measure updates of given gradients, without forward and backward."""
    for shape in shapes.split(","):
        rows = tuple(store_rows(results / f"update-{shape}.jsonl", measure_update(shape, rounds)))
        console().print(shape)
        console().print(update_table(rows))
        console().print(checks_table([(shape, update_checks([row.figures for row in rows]))]))


if __name__ == "__main__":
    run_command(main)
