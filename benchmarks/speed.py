"""Step time of graphopt against eager, in interleaved rounds.

``python -m benchmarks.speed --model NAME [--layers N] [--outputs A,B] [--rounds N]``
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.cells import seconds_cell
from benchmarks.command import (
    Layers,
    ModelName,
    Outputs,
    Results,
    Rounds,
    chosen_model,
    console,
    run_command,
    seed_weights,
)
from benchmarks.machine import this_machine
from benchmarks.measure import WARM_UP_STEPS, interleaved_seconds
from benchmarks.models import BenchmarkModel
from benchmarks.peers import EAGER, GRAPHOPT, eager_contender, graphopt_step, train_step_contender
from benchmarks.rows import RESULTS, Row, SpeedFigures, store_rows, subject_of

_DEFAULT_ROUNDS = 11


@dataclass(frozen=True)
class Quartiles:
    """The lower quartile, the median and the upper quartile."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """The quartiles of ``values``, of which one is enough."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


def measure_speed(model: BenchmarkModel, *, layers: int | None, rounds: int) -> Row[SpeedFigures]:
    """The row of ``model``: both loops warmed up, then ``rounds`` rounds of one step each."""
    seed_weights()
    module, batch = model.make_model(layers), model.make_batch()
    eager = eager_contender(module, batch)
    own = train_step_contender(graphopt_step(module, model.outputs), batch)
    started = time.perf_counter()
    own.step()
    first_step_seconds = time.perf_counter() - started
    interleaved_seconds({EAGER: eager.step, GRAPHOPT: own.step}, WARM_UP_STEPS)
    seconds = interleaved_seconds({EAGER: eager.step, GRAPHOPT: own.step}, rounds)
    figures = SpeedFigures(seconds[EAGER], seconds[GRAPHOPT], first_step_seconds)
    return Row(subject_of(model, module, batch, layers=layers), this_machine(), figures)


def speed_table(rows: Sequence[Row[SpeedFigures]]) -> Table:
    """One line for each model: medians, and the ratio of each round with its quartiles."""
    table = Table("model")
    for heading in ("rounds", "eager", "graphopt", "ratio", "lower quartile", "upper quartile", "first step"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures, ratio = row.figures, Quartiles.of(row.figures.ratios)
        table.add_row(
            row.subject.model,
            str(len(figures.ratios)),
            seconds_cell(statistics.median(figures.eager_seconds)),
            seconds_cell(statistics.median(figures.graphopt_seconds)),
            *(f"{value:.3f}" for value in (ratio.median, ratio.lower, ratio.upper)),
            seconds_cell(figures.first_step_seconds),
        )
    return table


def main(
    model: ModelName,
    layers: Layers = None,
    outputs: Outputs = None,
    rounds: Rounds = _DEFAULT_ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Measure the step time of graphopt's ATen backend against eager."""
    chosen = chosen_model(model, outputs)
    path = results / f"speed-{chosen.label(layers)}.jsonl"
    rows = tuple(store_rows(path, [measure_speed(chosen, layers=layers, rounds=rounds)]))
    console().print(speed_table(rows))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
