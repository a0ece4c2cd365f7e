"""Peak against step time: graphopt under policies and budgets, and every other way to spend time for memory.

``python -m benchmarks.frontier --model NAME [--backend aten,inductor] [--peers checkpointing,compile,compile-0.5]
[--checkpoint every-1,sqrt-n] [--points N] [--rounds N] [--layers N] [--outputs A,B] [--resume]``

One run measures them all: eager, transformers' gradient checkpointing, torch.compile with and without its memory
budget, and graphopt keeping everything, at budgets down to the smallest feasible, and at exactly the peak of each peer.
Peaks are the allocator's, in one steady-state step, above what rests between steps. Seconds are of interleaved rounds:
every point takes turns with eager, and a point at a peer's peak with that peer too. A contender that fails leaves a row
that says why. ``--resume`` takes over rows that are there: of a run that was cut short, which leaves them in a
``.partial`` file, or of one with fewer backends or peers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

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
    with_progress,
)
from benchmarks.frontier_bench import Done, FrontierBench, FrontierPlan, num_rows
from benchmarks.frontier_plot import frontier_plot
from benchmarks.frontier_rows import FrontierFigures
from benchmarks.frontier_table import acceptance_table, frontier_table
from benchmarks.machine import this_machine
from benchmarks.memory_peers import DEFAULT_PEERS, chosen_peers
from benchmarks.memory_settings import checkpoint_settings, split_list
from benchmarks.models import BenchmarkModel
from benchmarks.rows import RESULTS, Row, load_rows, subject_of
from graphopt.errors import DataError

_DEFAULT_ROUNDS = 5
_DEFAULT_POINTS = 8
_BACKENDS = ("aten", "inductor")

FrontierRow = Row[FrontierFigures]


def measure_frontier(
    model: BenchmarkModel, plan: FrontierPlan, *, layers: int | None, old: tuple[FrontierRow, ...] = ()
) -> Iterator[FrontierRow]:
    """The rows as they are measured; those in ``old`` are handed on as they are, wherever they come."""
    seed_weights()
    module, batch = model.make_model(layers), model.make_batch()
    subject, machine = subject_of(model, module, batch, layers=layers), this_machine()
    rows = {row.figures.key: row for row in old if row.subject == subject}
    done: Done = {key: row.figures for key, row in rows.items()}
    for figures in FrontierBench(module, batch, plan, done).measure():
        yield rows.get(figures.key, Row(subject, machine, figures))


def keep_rows(path: Path, rows: Iterator[FrontierRow], old: tuple[FrontierRow, ...] = ()) -> Iterator[FrontierRow]:
    """The rows, each handed on once it is written; ``path`` is replaced at the end. A cut run leaves its partial, with
    the ``old`` rows that it had not come to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, kept = partial_path(path), []
    with partial.open("w") as stream:
        stream.write("".join(map(_line, old)))
        stream.flush()
        for row in rows:
            kept.append(row)
            if row not in old:
                stream.write(_line(row))
                stream.flush()
            yield row
    partial.write_text("".join(map(_line, kept)))
    partial.replace(path)


def partial_path(path: Path) -> Path:
    """Where the rows are until the run is complete."""
    return path.with_suffix(".partial")


def old_rows(path: Path, *, rounds: int) -> tuple[FrontierRow, ...]:
    """The rows of as many rounds in ``path`` and in what a cut run has left beside it; what failed is tried again."""
    partial = partial_path(path)
    if partial.exists():
        complete, newline, _ = partial.read_text().rpartition("\n")  # a cut run may end inside a line
        partial.write_text(complete + newline)
    rows = [row for file in (path, partial) if file.exists() for row in load_rows(file, FrontierFigures)]
    newest = {row.figures.key: row for row in rows}
    return tuple(row for row in newest.values() if len(row.figures.own_seconds) == rounds)


def _line(row: FrontierRow) -> str:
    return json.dumps(asdict(row)) + "\n"


def chosen_backends(text: str) -> tuple[str, ...]:
    """The backends of a list; DataError for others."""
    names = split_list(text)
    if not names or not set(names) <= set(_BACKENDS):
        raise DataError(f"--backend expects some of {', '.join(_BACKENDS)}; came {text!r}")
    return names


def main(
    model: ModelName,
    layers: Layers = None,
    outputs: Outputs = None,
    backend: Annotated[str, typer.Option(help="Backends of graphopt.")] = ",".join(_BACKENDS),
    peers: Annotated[str, typer.Option(help="Peers; compile-SHARE is torch.compile with a budget.")] = DEFAULT_PEERS,
    checkpoint: Annotated[str, typer.Option(help="Policies of graphopt, such as every-1.")] = "every-1,sqrt-n",
    points: Annotated[int, typer.Option(min=1, help="Budgets from the smallest feasible up.")] = _DEFAULT_POINTS,
    rounds: Rounds = _DEFAULT_ROUNDS,
    resume: Annotated[bool, typer.Option(help="Take over the rows that an earlier run has left.")] = False,
    results: Results = RESULTS,
) -> None:
    """Measure peak against time of every way to train a model, and draw it."""
    chosen = chosen_model(model, outputs)
    plan = FrontierPlan(
        outputs=chosen.outputs,
        backends=chosen_backends(backend),
        peers=chosen_peers(peers),
        policies=checkpoint_settings(checkpoint),
        points=points,
        rounds=rounds,
    )
    label = chosen.label(layers)
    path = results / f"frontier-{label}.jsonl"
    old = old_rows(path, rounds=rounds) if resume else ()
    measured = keep_rows(path, measure_frontier(chosen, plan, layers=layers, old=old), old)
    rows = list(with_progress(measured, total=num_rows(plan), description=model))
    path.with_suffix(".svg").write_text(frontier_plot(label, [row.figures for row in rows]))
    console().print(frontier_table(rows))
    console().print(acceptance_table([rows]))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
