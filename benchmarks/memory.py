"""THE suite: bytes before and after every pass, against eager and torch.compile.

``python -m benchmarks.memory --model NAME [--layers N] [--outputs A,B] [--rounds N] [--no-compile-peer]``

Every prefix of the whole pipeline is compiled, run and measured as a training step of its own. Peaks are the
allocator's, in one steady-state step, above what rests between steps (parameters, buffers, optimizer state, batch); the
whole is their sum. All contenders train one and the same model, each with an optimizer state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from benchmarks.machine import this_machine
from benchmarks.memory_table import memory_table
from benchmarks.models import BenchmarkModel
from benchmarks.prefixes import pass_prefixes
from benchmarks.rows import RESULTS, MemoryFigures, Row, store_rows, subject_of
from benchmarks.steps import StepBench

_DEFAULT_ROUNDS = 3


@dataclass(frozen=True)
class MemorySuite:
    """What to run: the model, with how many layers, rounds of timing, and whether torch.compile is a peer."""

    model: BenchmarkModel
    layers: int | None = None
    rounds: int = _DEFAULT_ROUNDS
    compile_peer: bool = True

    @property
    def num_rows(self) -> int:
        """How many rows ``measure`` gives."""
        return len(pass_prefixes()) + (3 if self.compile_peer else 2)

    def measure(self) -> Iterator[Row[MemoryFigures]]:
        """The rows as they are measured: the peers, then every prefix."""
        seed_weights()
        model, batch = self.model.make_model(self.layers), self.model.make_batch()
        subject, machine = subject_of(self.model, model, batch, layers=self.layers), this_machine()
        bench = StepBench(model, batch, self.model.outputs, rounds=self.rounds)
        for figures in bench.peers(compile_peer=self.compile_peer):
            yield Row(subject, machine, figures)
        for prefix in pass_prefixes():
            yield Row(subject, machine, bench.prefix(prefix))


def main(
    model: ModelName,
    layers: Layers = None,
    outputs: Outputs = None,
    rounds: Rounds = _DEFAULT_ROUNDS,
    compile_peer: Annotated[bool, typer.Option(help="Whether torch.compile is measured too.")] = True,
    results: Results = RESULTS,
) -> None:
    """Measure the memory and time of a model's training step before and after every pass."""
    suite = MemorySuite(chosen_model(model, outputs), layers=layers, rounds=rounds, compile_peer=compile_peer)
    path = results / f"memory-{suite.model.label(layers)}.jsonl"
    rows = list(store_rows(path, with_progress(suite.measure(), total=suite.num_rows, description=model)))
    console().print(memory_table(rows))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
