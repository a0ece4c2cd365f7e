"""How compile time grows with the number of layers.

``python -m benchmarks.compile_time --model NAME --layers 12,24,48``

Each number of layers is compiled in a process of its own, behind the same model with 1 layer, which takes the costs
that no second model has (imports inside torch, measuring what each distinct operator allocates). The model keeps its
width, vocabulary and batch. Nothing runs but the compiler.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer
from rich.table import Table

import graphopt
from benchmarks.cells import ratio_cell, seconds_cell
from benchmarks.command import (
    ModelName,
    Outputs,
    Results,
    chosen_model,
    console,
    quiet_transformers,
    run_command,
    seed_weights,
    with_progress,
)
from benchmarks.machine import this_machine
from benchmarks.models import BenchmarkModel
from benchmarks.peers import graphopt_step
from benchmarks.rows import RESULTS, CompileTimeFigures, Row, store_rows, subject_of
from graphopt.build import Builder, bind_batch
from graphopt.capture.differentiate import differentiate
from graphopt.capture.export import capture_program
from graphopt.capture.update import UpdateRequest, append_update
from graphopt.errors import DataError
from graphopt.execute.collector import paused_collector
from graphopt.execute.executable import build_executable
from graphopt.execute.step import TrainStep
from graphopt.ir.program import Stage
from graphopt.ir.spec import OutputKind

_DEFAULT_LAYERS = "12,24,48"
_PARTS = ("capture", "differentiate", "pass", "update", "emit")


class Stopwatch:
    """Adds up seconds by part; each ``lap`` takes what went by since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.started
        self.started = now


def time_compile(model: BenchmarkModel, layers: int) -> Row[CompileTimeFigures]:
    """The row of ``model`` with ``layers`` layers, compiled in this process behind one of 1 layer."""
    _compile(model, 1)
    return _compile(model, layers)


def growth(figures: CompileTimeFigures, first: CompileTimeFigures) -> float:
    """Seconds over what linear growth from ``first`` would be; above 1: faster than linear."""
    return (figures.total_seconds / first.total_seconds) / (figures.layers / first.layers)


def compile_time_table(rows: tuple[Row[CompileTimeFigures], ...]) -> Table:
    """One line for each number of layers."""
    table = Table("layers", title=rows[0].subject.model)
    for heading in ("parameters", "ops", *_PARTS, "total", "of linear growth"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = row.figures
        table.add_row(
            str(figures.layers),
            f"{row.subject.num_parameters / 1e6:.1f} M",
            str(figures.num_ops),
            *(seconds_cell(getattr(figures, f"{part}_seconds")) for part in _PARTS),
            seconds_cell(figures.total_seconds),
            ratio_cell(growth(figures, rows[0].figures), 1.0),
        )
    return table


@paused_collector()
def _compile(model: BenchmarkModel, layers: int) -> Row[CompileTimeFigures]:
    seed_weights()
    module, batch = model.make_model(layers), model.make_batch()
    step: TrainStep = graphopt_step(module, model.outputs)
    builder: Builder = step.builder  # type: ignore[assignment]
    watch = Stopwatch()
    captured = capture_program(module, bind_batch(module, batch), builder.request)
    watch.lap("capture")
    program = builder.run_passes(captured.program, Stage.FORWARD, None)
    watch.lap("pass")
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    program = differentiate(program, roots=[builder.request.loss_name], wrt=names)
    watch.lap("differentiate")
    program = builder.run_passes(program, Stage.JOINT, None)
    watch.lap("pass")
    reached = tuple(output.name for _, output in program.signature.outputs_of(OutputKind.GRAD))
    program = append_update(program, UpdateRequest(graphopt.optim.AdamW(), step.state.buckets(reached), clip=False))
    watch.lap("update")
    program = builder.run_passes(program, Stage.STEP, None)
    watch.lap("pass")
    executable = build_executable(program, title=model.label(layers))
    watch.lap("emit")
    seconds = {f"{part}_seconds": watch.seconds[part] for part in _PARTS}
    figures = CompileTimeFigures(layers=layers, num_ops=len(executable.program.ops()), **seconds)
    return Row(subject_of(model, module, batch, layers=None), this_machine(), figures)


def _rows(model: BenchmarkModel, layers: tuple[int, ...]) -> Iterator[Row[CompileTimeFigures]]:
    for count in layers:
        # A fresh process each: nothing that one size has taught the compiler helps the next.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=quiet_transformers) as pool:
            yield pool.submit(time_compile, model, count).result()


def _layer_counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise DataError(f"--layers expects numbers separated by commas, such as {_DEFAULT_LAYERS}; came {text!r}")
    return tuple(map(int, parts))


def main(
    model: ModelName,
    layers: Annotated[str, typer.Option(help="Numbers of layers, the first being what others are compared with.")] = (
        _DEFAULT_LAYERS
    ),
    outputs: Outputs = None,
    results: Results = RESULTS,
) -> None:
    """Time capture, differentiation, passes, planning and emission by number of layers."""
    chosen, counts = chosen_model(model, outputs), _layer_counts(layers)
    path = results / f"compile-time-{chosen.name}.jsonl"
    rows = store_rows(path, with_progress(_rows(chosen, counts), total=len(counts), description=model))
    console().print(compile_time_table(tuple(rows)))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
