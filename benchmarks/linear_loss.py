"""The fused linear + cross-entropy against torch's, forward and backward: bytes, and seconds of interleaved rounds.

``python -m benchmarks.linear_loss [--rounds N] [--shapes 1022x768x32000,...]``; a shape is rows x features x classes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from benchmarks.rows import RESULTS, LinearLossFigures, Row, Subject, store_rows
from graphopt.errors import DataError
from graphopt.execute.measure import measure_memory
from graphopt.ir.linear_loss import MEAN, default_chunk
from graphopt.operators.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_gradient

SHAPES = "1022x768x32000,2044x512x256,1024x768x50257"
UNFUSED = "F.cross_entropy(F.linear)"
TOGETHER = "graphopt, loss with gradient"
APART = "graphopt, loss then gradient"
_DEFAULT_ROUNDS = 5
_LARGER_CHUNK = 256
_IGNORED = -100


@dataclass(frozen=True)
class Problem:
    """hidden [N,D], weight [V,D], target [N]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @classmethod
    def of(cls, shape: str) -> Problem:
        """The problem of a shape such as ``1022x768x32000``; the same one in every run."""
        try:
            rows, features, classes = (int(size) for size in shape.split("x"))
        except ValueError as error:
            raise DataError(
                f"a shape is rows x features x classes such as {SHAPES.split(',')[0]}, came {shape!r}"
            ) from error
        seed_weights()
        hidden = torch.randn(rows, features, requires_grad=True)
        weight = (torch.randn(classes, features) * features**-0.5).requires_grad_()
        return cls(hidden, weight, torch.randint(0, classes, (rows,)))

    def differentiated(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The loss and its gradients."""
        return (loss.detach(), *torch.autograd.grad(loss, (self.hidden, self.weight)))

    def arguments(self, chunk: int) -> tuple[Any, ...]:
        """What the fused operators take, behind the head's tensors without a bias."""
        options = (_IGNORED, 0.0, 0.0, 0.0, 1.0, MEAN, torch.float32)
        return (self.hidden, self.weight, None, self.target, None, *options, chunk)


def contenders(problem: Problem) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Every way to the loss and its gradients, by name."""
    (rows, features), classes = problem.hidden.shape, problem.weight.shape[0]
    found = {
        UNFUSED: lambda: problem.differentiated(
            F.cross_entropy(F.linear(problem.hidden, problem.weight), problem.target)
        )
    }
    chosen = default_chunk(rows, classes, features)
    for policy, chunk in (("auto", None), ("compact", None), ("compact", chosen)):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, acc_policy=policy)
        found[f"F.linear_cross_entropy, {policy}, chunk {chunk or 'auto'}"] = partial(_torch, problem, options)
    for chunk in dict.fromkeys((chosen, min(_LARGER_CHUNK, rows))):
        found[f"{TOGETHER}, chunk {chunk}"] = partial(_together, problem, chunk)
    found[f"{APART}, chunk {chosen}"] = lambda: problem.differentiated(
        linear_cross_entropy(*problem.arguments(chosen))[0]
    )
    return found


def _torch(problem: Problem, options: torch.nn.LinearCrossEntropyOptions) -> tuple[Tensor, ...]:
    return problem.differentiated(
        F.linear_cross_entropy(problem.hidden, problem.weight, problem.target, options=options)
    )


@torch.no_grad()
def _together(problem: Problem, chunk: int) -> tuple[Tensor, ...]:
    found = linear_cross_entropy_with_gradient(torch.ones(()), *problem.arguments(chunk), [True, True, False])
    return found[0], found[3], found[4]


def measure_shape(shape: str, rounds: int) -> Iterator[Row[LinearLossFigures]]:
    """A row for each contender; they are timed in the same rounds."""
    problem = Problem.of(shape)
    found = contenders(problem)
    peaks = {name: measure_memory(run).peak_bytes for name, run in found.items()}  # also the warm-up
    seconds = interleaved_seconds(found, rounds)
    expected = found[UNFUSED]()
    subject = Subject(shape, problem.weight.numel(), f"hidden f32[{shape.rpartition('x')[0]}]", ("loss",))
    for name, run in found.items():
        error = max(_relative_error(own, other) for own, other in zip(run(), expected, strict=True))
        yield Row(subject, this_machine(), LinearLossFigures(name, peaks[name], seconds[name], error))


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def linear_loss_table(rows: Sequence[Row[LinearLossFigures]]) -> Table:
    """One line for each contender: peak and median with their ratio to the unfused form, and the error to it."""
    table = Table("way")
    for heading in ("peak", "of unfused", "median", "of unfused", "fastest", "error"):
        table.add_column(heading, justify="right")
    base = next(row.figures for row in rows if row.figures.name == UNFUSED)
    for figures in (row.figures for row in rows):
        median = statistics.median(figures.seconds)
        table.add_row(
            figures.name,
            bytes_cell(figures.peak_bytes),
            ratio_cell(figures.peak_bytes, base.peak_bytes),
            seconds_cell(median),
            ratio_cell(median, statistics.median(base.seconds)),
            seconds_cell(min(figures.seconds)),
            f"{figures.relative_error:.1e}",
        )
    return table


def main(
    shapes: Annotated[str, typer.Option(help="Shapes, rows x features x classes, with commas between.")] = SHAPES,
    rounds: Rounds = _DEFAULT_ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Measure the fused linear + cross-entropy against torch's own."""
    for shape in shapes.split(","):
        rows = tuple(store_rows(results / f"linear-loss-{shape}.jsonl", measure_shape(shape, rounds)))
        console().print(shape)
        console().print(linear_loss_table(rows))


if __name__ == "__main__":
    run_command(main)
