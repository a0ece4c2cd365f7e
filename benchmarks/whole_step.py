"""The whole training step, parameters, state and everything: eager, public 8-bit recipes, graphopt.

``python -m benchmarks.whole_step --model NAME [--checkpoint every-1,sqrt-n] [--peers eager,torchao,bitsandbytes]
[--rounds N] [--layers N] [--outputs A,B]``

Eager trains in float32 with torch.optim.AdamW. The recipes are transformers' checkpointing of every layer, bf16
autocast, and AdamW8bit of torchao or bitsandbytes. All these let go of the logits before backward, which is the
thriftiest loop. graphopt computes in bf16 with its AdamW8bit, once with the state of embeddings in float32 and once in
8 bits, under each checkpoint policy. Every contender has a model of its own. What rests is every byte of tensors that
lives between steps and did not before the contender was made; the peak above it is the allocator's in a steady step.
Seconds are of interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from torch import nn

from benchmarks.checks_table import checks_table
from benchmarks.command import (
    Layers,
    ModelName,
    Outputs,
    Results,
    chosen_model,
    console,
    run_command,
    seed_weights,
    with_progress,
)
from benchmarks.eight_bit_peers import (
    BITSANDBYTES,
    TORCHAO,
    adamw_8bit,
    loss_alone,
    low_precision_contender,
)
from benchmarks.live_bytes import bytes_since, live_storages
from benchmarks.machine import this_machine
from benchmarks.measure import interleaved_seconds, measure_peak, optimizer_tensors, storage_bytes
from benchmarks.memory_settings import MemorySetting, checkpoint_settings, split_list
from benchmarks.models import Batch, BenchmarkModel
from benchmarks.peers import EAGER, GRAPHOPT, Contender, graphopt_step, torch_contender, train_step_contender
from benchmarks.rows import RESULTS, Row, store_rows, subject_of
from benchmarks.steps import first_line
from benchmarks.whole_step_table import WholeStepFigures, whole_step_checks, whole_step_table
from graphopt.errors import DataError
from graphopt.optim import AdamW8bit

PEERS = (EAGER, TORCHAO, BITSANDBYTES)
EMBEDDING_STATES = ("fp32", "int8")
_DEFAULT_ROUNDS = 5
# What transformers' checkpointing does: of every layer only the input is kept.
_DEFAULT_POLICIES = "every-1"

Policies = Sequence[MemorySetting]


@dataclass(frozen=True)
class Entry:
    """A contender to come: ``make()`` builds its model and all it needs."""

    figures: WholeStepFigures
    make: Callable[[], Contender]


class WholeStepBench:
    """Measures the entries one after the other, then times those that ran in common rounds."""

    def __init__(self, model: BenchmarkModel, *, layers: int | None, rounds: int) -> None:
        self.model = model
        self.layers = layers
        self.rounds = rounds
        self.batch: Batch = model.make_batch()

    def entries(self, peers: Sequence[str], policies: Policies) -> tuple[Entry, ...]:
        """The peers, then graphopt under each policy with each state of embeddings."""
        found = [Entry(WholeStepFigures(peer), lambda peer=peer: self._peer(peer)) for peer in peers]
        for policy in policies:
            for state in EMBEDDING_STATES:
                figures = WholeStepFigures(GRAPHOPT, policy.name, state)
                found.append(Entry(figures, lambda policy=policy, state=state: self._own(policy, state)))
        return tuple(found)

    def measure(self, entries: Sequence[Entry]) -> tuple[WholeStepFigures, ...]:
        """The figures of every entry, in their order; whatever stops one becomes its note."""
        measured: dict[str, WholeStepFigures] = {}
        running: dict[str, Contender] = {}
        for entry in with_progress(entries, total=len(entries), description="memory"):
            label = entry.figures.label
            try:
                running[label], measured[label] = self._memory(entry)
            except Exception as error:  # a failure is the contender's result; the others are still to be measured
                measured[label] = replace(entry.figures, note=first_line(error))
        seconds = interleaved_seconds({label: contender.step for label, contender in running.items()}, self.rounds)
        return tuple(replace(figures, seconds=seconds.get(label, ())) for label, figures in measured.items())

    def _memory(self, entry: Entry) -> tuple[Contender, WholeStepFigures]:
        before = live_storages()
        contender = entry.make()
        peak_bytes, first_step_seconds = measure_peak(contender)
        figures = replace(
            entry.figures,
            resting_bytes=bytes_since(before) + storage_bytes(self.batch.values()),
            state_bytes=storage_bytes(optimizer_tensors(contender.optimizer)),
            peak_bytes=peak_bytes,
            first_step_seconds=first_step_seconds,
        )
        return contender, figures

    def _peer(self, name: str) -> Contender:
        # Missing packages are told before the model is made.
        make_optimizer = None if name == EAGER else adamw_8bit(name)
        module = self._module()
        if make_optimizer is None:
            return torch_contender(EAGER, loss_alone(module), module, self.batch)
        return low_precision_contender(name, module, self.batch, make_optimizer(module.parameters()))

    def _own(self, policy: MemorySetting, embeddings: str) -> Contender:
        optimizer = AdamW8bit(lr=1e-3, embeddings=embeddings)
        step = graphopt_step(
            self._module(), self.model.outputs, optimizer=optimizer, precision="bf16", **policy.options
        )
        return train_step_contender(step, self.batch)

    def _module(self) -> nn.Module:
        seed_weights()
        return self.model.make_model(self.layers)


def measure_whole_step(
    model: BenchmarkModel, *, layers: int | None, rounds: int, peers: Sequence[str], policies: Policies
) -> Iterator[Row[WholeStepFigures]]:
    """The rows of ``model``."""
    seed_weights()
    subject, machine = subject_of(model, model.make_model(layers), model.make_batch(), layers=layers), this_machine()
    bench = WholeStepBench(model, layers=layers, rounds=rounds)
    for figures in bench.measure(bench.entries(peers, policies)):
        yield Row(subject, machine, figures)


def chosen_peers(text: str) -> tuple[str, ...]:
    """The peers of a list such as ``eager,torchao``; DataError for one that does not exist."""
    names = split_list(text)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise DataError(f"--peers expects names out of {', '.join(PEERS)}; came {', '.join(unknown)}")
    return names


def main(
    model: ModelName,
    layers: Layers = None,
    outputs: Outputs = None,
    peers: Annotated[str, typer.Option(help="Out of eager, torchao, bitsandbytes.")] = ",".join(PEERS),
    checkpoint: Annotated[str, typer.Option(help="Policies of graphopt; none: the peers alone.")] = _DEFAULT_POLICIES,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of timing; 0: bytes alone.")] = _DEFAULT_ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Measure peak and time of whole training steps."""
    chosen, policies = chosen_model(model, outputs), checkpoint_settings(checkpoint)
    rows = measure_whole_step(chosen, layers=layers, rounds=rounds, peers=chosen_peers(peers), policies=policies)
    path = results / f"whole-step-{chosen.label(layers)}.jsonl"
    stored = tuple(store_rows(path, rows))
    console().print(whole_step_table(stored))
    console().print(checks_table([(chosen.label(layers), whole_step_checks([row.figures for row in stored]))]))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
