"""Training a small language model on real text with optimizer state in several formats: how far the losses drift.

``python -m benchmarks.drift [--steps N] [--seeds N] [--text FILE]``

One byte-level GPT learns from text, by the same batches and the same schedule, with AdamW's state in float32, in bf16,
and by blocks in 8 bits with the companded and with the dynamic map. Small as it is, all its matrices, embeddings
included, are in 8 bits. Losses are nats per byte on text that is never trained on. The seed chooses weights and
batches, so that runs of one seed differ in nothing but the state.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import scipy.stats
import torch
import typer
from rich import box
from rich.table import Table

import graphopt
from benchmarks.acceptance import Check
from benchmarks.checks_table import checks_table
from benchmarks.command import Results, console, run_command, with_progress
from benchmarks.machine import this_machine
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from graphopt.optim import AdamW, AdamW8bit, Optimizer
from graphopt.train.byte_gpt import ByteGPT, ByteGPTConfig
from graphopt.train.text_data import TextData, WindowShape, load_text, split_text

FLOAT32, BFLOAT16 = "float32", "bf16"
COMPANDED, DYNAMIC = "8 bits, companded", "8 bits, dynamic"
_DEFAULT_STEPS = 1000
_DEFAULT_SEEDS = 3
_NUM_LOSSES = 10
_NUM_HELD_OUT_BATCHES = 16
_WARM_UP_SHARE = 0.1
_LAST_FACTOR = 0.1
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class DriftRecipe:
    """What is trained and how; ``lr`` is reached in a line over a tenth of the steps and falls along a cosine."""

    model: ByteGPTConfig = field(default_factory=lambda: ByteGPTConfig(width=64, num_layers=2, max_length=64))
    batch_size: int = 8
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad_norm: float = 1.0
    steps: int = _DEFAULT_STEPS

    def optimizers(self) -> Mapping[str, Optimizer]:
        """The same AdamW with its state in each format."""
        options: dict[str, Any] = {"lr": self.lr, "betas": self.betas, "weight_decay": self.weight_decay}
        eight_bit = {map_: AdamW8bit(**options, map=map_, embeddings="int8") for map_ in ("companded", "dynamic")}
        return {
            FLOAT32: AdamW(**options),
            BFLOAT16: AdamW(**options, state="bf16"),
            COMPANDED: eight_bit["companded"],
            DYNAMIC: eight_bit["dynamic"],
        }


@dataclass(frozen=True)
class DriftFigures:
    """One run. ``losses``: on held-out text after each tenth of the steps, the last at the end, in nats per byte.

    ``state_bytes``: what the optimizer keeps for a parameter, measured.
    """

    state: str
    seed: int
    steps: int
    losses: tuple[float, ...]
    state_bytes: float
    seconds: float

    @property
    def final_loss(self) -> float:
        """After the last step."""
        return self.losses[-1]


@dataclass(frozen=True)
class Drift:
    """All runs together. Gaps are final losses minus that of float32 state with the same seed."""

    figures: Sequence[DriftFigures]

    def finals(self, state: str) -> tuple[float, ...]:
        """Final losses by seed."""
        return tuple(found.final_loss for found in self.figures if found.state == state)

    @property
    def spread(self) -> float:
        """From the best seed to the worst with float32 state."""
        finals = self.finals(FLOAT32)
        return max(finals) - min(finals)

    def gaps(self, state: str, base: str = FLOAT32) -> tuple[float, ...]:
        """By seed, how much larger the final loss is than with state ``base``."""
        return tuple(own - other for own, other in zip(self.finals(state), self.finals(base), strict=True))

    def standard_error(self, state: str, base: str) -> float:
        """Of the mean of ``gaps``; 0 for a single seed."""
        gaps = self.gaps(state, base)
        return statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0


def train(recipe: DriftRecipe, state: str, seed: int, data: TextData) -> DriftFigures:
    """One run from fresh weights."""
    torch.manual_seed(seed)
    model = ByteGPT(recipe.model)
    optimizer = recipe.optimizers()[state]
    step = graphopt.compile(
        model, outputs=["loss"], optimizer=optimizer, clip_grad_norm=recipe.clip_grad_norm, backend="aten"
    )
    losses, seconds = train_and_evaluate(step, recipe.steps, seed, data)
    return DriftFigures(state, seed, recipe.steps, losses, _state_bytes(step), seconds)


def measure_drift(recipe: DriftRecipe, seeds: Sequence[int], text: bytes) -> Iterator[Row[DriftFigures]]:
    """The row of every seed with every state."""
    data = split_text(text, WindowShape(recipe.batch_size, recipe.model.max_length))
    size = sum(parameter.numel() for parameter in ByteGPT(recipe.model).parameters())
    subject = Subject("byte-gpt", size, f"ids i64[{recipe.batch_size},{recipe.model.max_length}]", ("loss",))
    machine = this_machine()
    for seed in seeds:
        for state in recipe.optimizers():
            yield Row(subject, machine, train(recipe, state, seed, data))


def drift_table(rows: Sequence[Row[DriftFigures]], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each format of the state, over all seeds."""
    drift = Drift([row.figures for row in rows])
    table = Table("state", box=layout)
    headings = ("steps", "seeds", "bytes a parameter", "final loss", "gap to float32", "largest gap", "seed spread")
    for heading in headings:
        table.add_column(heading, justify="right")
    for state in dict.fromkeys(found.state for found in drift.figures):
        own = [found for found in drift.figures if found.state == state]
        gaps = drift.gaps(state)
        table.add_row(
            state,
            str(own[0].steps),
            str(len(own)),
            f"{own[0].state_bytes:.2f}",
            f"{statistics.fmean(drift.finals(state)):.4f}",
            f"{statistics.fmean(gaps):+.4f}",
            f"{max(gaps, key=abs):+.4f}",
            f"{drift.spread:.4f}",
        )
    return table


def drift_checks(figures: Sequence[DriftFigures]) -> tuple[Check, ...]:
    """8-bit state must end within the seeds' spread of float32 state, and no worse than with the dynamic map as far as
    so few seeds can tell: below the one-sided 95 % point of Student's t. With one seed there is neither."""
    drift = Drift(figures)
    seeds = len(drift.finals(FLOAT32))
    if seeds < 2:
        return ()
    gap, behind = (statistics.fmean(drift.gaps(COMPANDED, base)) for base in (FLOAT32, DYNAMIC))
    error = drift.standard_error(COMPANDED, DYNAMIC)
    return (
        Check(FLOAT32, f"{COMPANDED}: gap over the spread of seeds", _ratio(gap, drift.spread), 1.0),
        Check(
            DYNAMIC,
            f"{COMPANDED}: difference over its standard error",
            _ratio(behind, error),
            float(scipy.stats.t.ppf(_CONFIDENCE, seeds - 1)),
        ),
    )


def _ratio(figure: float, base: float) -> float:
    """``figure / base``; without a spread to compare with only what is not above 0 is within it."""
    return figure / base if base else math.copysign(math.inf, figure) if figure else 0.0


def train_and_evaluate(step: Any, steps: int, seed: int, data: TextData) -> tuple[tuple[float, ...], float]:
    """Held-out losses after each tenth of ``steps``, on batches that ``seed`` chooses, and the seconds of it all."""
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, schedule_factor(steps))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    started = time.perf_counter()
    for position in range(1, steps + 1):
        ids = data.train_batch(generator)
        step(ids=ids, labels=ids)
        schedule.step()
        if position == steps or position % max(1, steps // _NUM_LOSSES) == 0:
            losses.append(held_out_loss(step, data))
    return tuple(losses), time.perf_counter() - started


def schedule_factor(steps: int) -> Callable[[int], float]:
    """The share of the learning rate by position: a line over the first tenth, then a cosine to a tenth."""
    warm_up = max(1, round(steps * _WARM_UP_SHARE))

    def factor(position: int) -> float:
        if position < warm_up:
            return (position + 1) / warm_up
        done = min(1.0, (position - warm_up) / max(1, steps - warm_up))
        return _LAST_FACTOR + (1 - _LAST_FACTOR) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def held_out_loss(step: Any, data: TextData) -> float:
    """The mean loss on text that is never trained on, in nats per byte."""
    batches = data.held_out_batches(_NUM_HELD_OUT_BATCHES)
    return statistics.fmean(float(step.eval(ids=ids, labels=ids).loss) for ids in batches)


def _state_bytes(step: Any) -> float:
    """Bytes of state for each parameter; step counts are not counted."""
    tensors = [value for state in step.optimizer.state.values() for value in state.values() if _is_moment(value)]
    size = sum(parameter.numel() for parameter in step.model.parameters())
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors) / size


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def main(
    steps: Annotated[int, typer.Option(min=10, help="Steps of each run.")] = _DEFAULT_STEPS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with each state, of seeds 0 and on.")] = _DEFAULT_SEEDS,
    text: Annotated[Path | None, typer.Option(help="A text file; none: Python's own documentation.")] = None,
    results: Results = RESULTS,
) -> None:
    """Train with the optimizer's state in several formats and compare held-out losses."""
    recipe = DriftRecipe(steps=steps)
    rows = measure_drift(recipe, range(seeds), load_text(text))
    total = seeds * len(recipe.optimizers())
    path = results / f"drift-byte-gpt-{steps}.jsonl"
    stored = tuple(store_rows(path, with_progress(rows, total=total, description="training")))
    console().print(drift_table(stored))
    console().print(checks_table([("byte-gpt", drift_checks([row.figures for row in stored]))]))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
