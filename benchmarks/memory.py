"""THE suite: bytes before and after every pass, against eager and torch.compile.

``python -m benchmarks.memory --model NAME [--layers N] [--outputs A,B] [--rounds N] [--no-compile-peer]
[--checkpoint every-1,sqrt-n] [--memory 2GiB,0.8]``

Every prefix of the whole pipeline is compiled, run and measured as a training step of its own. Peaks are the
allocator's, in one steady-state step, above what rests between steps (parameters, buffers, optimizer state, batch); the
whole is their sum. All contenders train one and the same model, each with an optimizer state of its own.
``--checkpoint`` and ``--memory`` add rows of the whole product under those policies and budgets.
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
from benchmarks.memory_settings import MemorySetting, checkpoint_settings, memory_settings
from benchmarks.memory_table import memory_table
from benchmarks.models import BenchmarkModel
from benchmarks.prefixes import pass_prefixes
from benchmarks.rows import RESULTS, MemoryFigures, Row, store_rows, subject_of
from benchmarks.steps import StepBench

_DEFAULT_ROUNDS = 3


@dataclass(frozen=True)
class MemorySuite:
    """What to run: the model, with how many layers, rounds of timing, whether torch.compile is a peer, and under which
    policies and budgets the whole product is measured too."""

    model: BenchmarkModel
    layers: int | None = None
    rounds: int = _DEFAULT_ROUNDS
    compile_peer: bool = True
    settings: tuple[MemorySetting, ...] = ()

    @property
    def num_rows(self) -> int:
        """How many rows ``measure`` gives."""
        return len(pass_prefixes()) + (3 if self.compile_peer else 2) + len(self.settings)

    def measure(self) -> Iterator[Row[MemoryFigures]]:
        """The rows as they are measured: the peers, every prefix, every policy and budget."""
        seed_weights()
        model, batch = self.model.make_model(self.layers), self.model.make_batch()
        subject, machine = subject_of(self.model, model, batch, layers=self.layers), this_machine()
        bench = StepBench(model, batch, self.model.outputs, rounds=self.rounds)
        for figures in bench.peers(compile_peer=self.compile_peer):
            yield Row(subject, machine, figures)
        for prefix in pass_prefixes():
            yield Row(subject, machine, bench.prefix(prefix))
        for setting in self.settings:
            yield Row(subject, machine, bench.setting(setting))


def main(
    model: ModelName,
    layers: Layers = None,
    outputs: Outputs = None,
    rounds: Rounds = _DEFAULT_ROUNDS,
    compile_peer: Annotated[bool, typer.Option(help="Whether torch.compile is measured too.")] = True,
    checkpoint: Annotated[str | None, typer.Option(help="Policies to measure too, such as every-1,sqrt-n.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budgets to measure too: bytes or shares, as 2GiB,0.8.")] = None,
    results: Results = RESULTS,
) -> None:
    """Measure the memory and time of a model's training step before and after every pass."""
    suite = MemorySuite(
        chosen_model(model, outputs),
        layers=layers,
        rounds=rounds,
        compile_peer=compile_peer,
        settings=(*checkpoint_settings(checkpoint), *memory_settings(memory)),
    )
    path = results / f"memory-{suite.model.label(layers)}.jsonl"
    rows = list(store_rows(path, with_progress(suite.measure(), total=suite.num_rows, description=model)))
    console().print(memory_table(rows))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
