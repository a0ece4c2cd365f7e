"""Training a small language model on real text with products in FP8, by every recipe, beside bf16.

``python -m benchmarks.fp8_training [--steps N] [--seeds 0,1,2] [--recipes bf16,rowwise] [--text FILE]``

One byte-level GPT learns from text by the same batches and the same schedule. The seed chooses weights and batches, so
that runs of one seed differ in nothing but the recipe. Losses are nats per byte on text that is never trained on.
Each run is a row, appended when it ends. Rows that are there are not measured again: a run that was cut short goes on,
and settings may be run by one process each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

import graphopt
from benchmarks.checks_table import checks_table
from benchmarks.command import Results, console, run_command, with_progress
from benchmarks.drift import train_and_evaluate
from benchmarks.fp8_training_table import BFLOAT16, Fp8TrainingFigures, TrainingRow, training_checks, training_table
from benchmarks.machine import this_machine
from benchmarks.rows import RESULTS, Row, Subject, load_rows
from graphopt.errors import DataError
from graphopt.fp8 import Blockwise, Delayed, Recipe, Rowwise, Tensorwise
from graphopt.optim import AdamW
from graphopt.train.byte_gpt import ByteGPT, ByteGPTConfig
from graphopt.train.text_data import TextData, WindowShape, load_text, split_text

_DEFAULT_STEPS = 1000
_DEFAULT_SEEDS = "0,1,2"

PRECISIONS: Mapping[str, str | Recipe] = {
    BFLOAT16: "bf16",
    "tensorwise": Tensorwise(),
    "rowwise": Rowwise(),
    "blockwise": Blockwise(),
    "delayed": Delayed(history=16),
}


@dataclass(frozen=True)
class TrainingSetting:
    """What is trained and how. 128 channels are the least of which a block of 128 is one and not a part of one."""

    model: ByteGPTConfig = field(default_factory=lambda: ByteGPTConfig(width=128, num_layers=2, max_length=64))
    batch_size: int = 8
    lr: float = 2e-3
    weight_decay: float = 0.01
    clip_grad_norm: float = 1.0
    steps: int = _DEFAULT_STEPS

    @property
    def subject(self) -> Subject:
        """The model as rows name it."""
        size = sum(parameter.numel() for parameter in ByteGPT(self.model).parameters())
        label = f"byte-gpt-{self.model.width}x{self.model.num_layers}"
        return Subject(label, size, f"ids i64[{self.batch_size},{self.model.max_length}]", ("loss",))


def train(setting: TrainingSetting, recipe: str, seed: int, data: TextData) -> Fp8TrainingFigures:
    """One run from fresh weights."""
    torch.manual_seed(seed)
    step = graphopt.compile(
        ByteGPT(setting.model),
        outputs=["loss"],
        optimizer=AdamW(lr=setting.lr, weight_decay=setting.weight_decay),
        precision=PRECISIONS[recipe],
        clip_grad_norm=setting.clip_grad_norm,
        backend="aten",
    )
    losses, seconds = train_and_evaluate(step, setting.steps, seed, data)
    table = step.report().fp8
    return Fp8TrainingFigures(
        recipe=recipe,
        seed=seed,
        steps=setting.steps,
        losses=losses,
        num_fp8_products=len(table.eligible),
        num_products=len(table.rows),
        skipped_updates=step.state.skipped,
        seconds=seconds,
    )


def measure_training(
    setting: TrainingSetting, recipes: Sequence[str], seeds: Sequence[int], text: bytes, path: Path
) -> Iterator[TrainingRow]:
    """The row of every seed with every recipe: from ``path``, or trained and appended to it."""
    data = split_text(text, WindowShape(setting.batch_size, setting.model.max_length))
    subject = setting.subject
    found = {(row.figures.recipe, row.figures.seed): row for row in stored_rows(path, subject, setting.steps)}
    for seed in seeds:
        for recipe in recipes:
            if (recipe, seed) not in found:
                row = Row(subject, this_machine(), train(setting, recipe, seed, data))
                _append(path, row)
                found[recipe, seed] = row
            yield found[recipe, seed]


def stored_rows(path: Path, subject: Subject, steps: int) -> tuple[TrainingRow, ...]:
    """The rows of ``path``, in the order of recipes and seeds; DataError if they are of another model or length."""
    if not path.exists():
        return ()
    rows = load_rows(path, Fp8TrainingFigures)
    if any(row.subject != subject or row.figures.steps != steps for row in rows):
        raise DataError(
            f"{path} has rows of another model or of another number of steps than {subject.model} and {steps}: move it "
            "away, or give another folder with --results"
        )
    names = list(PRECISIONS)
    return tuple(sorted(rows, key=lambda row: (row.figures.seed, names.index(row.figures.recipe))))


def _append(path: Path, row: TrainingRow) -> None:
    """Write ``row`` behind the others, at once, so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(row)) + "\n"
    partial = path.with_suffix(".partial")
    partial.write_text((path.read_text() if path.exists() else "") + line)
    partial.replace(path)


def chosen_recipes(text: str) -> tuple[str, ...]:
    """The names of a list with commas between; DataError for one that is no recipe."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in PRECISIONS]:
        raise DataError(f"--recipes expects some of {', '.join(PRECISIONS)}; came {', '.join(unknown)}")
    return names


def chosen_seeds(text: str) -> tuple[int, ...]:
    """The seeds of a list with commas between; DataError for what is no number."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise DataError(f"--seeds expects numbers with commas between, such as {_DEFAULT_SEEDS}; came {text!r}")
    return tuple(map(int, parts))


def main(
    steps: Annotated[int, typer.Option(min=10, help="Steps of each run.")] = _DEFAULT_STEPS,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = _DEFAULT_SEEDS,
    recipes: Annotated[str, typer.Option(help="bf16 and FP8 recipes, with commas between.")] = ",".join(PRECISIONS),
    text: Annotated[Path | None, typer.Option(help="A text file; none: Python's own documentation.")] = None,
    results: Results = RESULTS,
) -> None:
    """Train with every FP8 recipe and in bf16, and compare held-out losses."""
    setting = TrainingSetting(steps=steps)
    chosen, numbers = chosen_recipes(recipes), chosen_seeds(seeds)
    path = results / f"fp8-training-{setting.subject.model}-{steps}.jsonl"
    rows = measure_training(setting, chosen, numbers, load_text(text), path)
    tuple(with_progress(rows, total=len(chosen) * len(numbers), description="training"))
    stored = stored_rows(path, setting.subject, steps)
    console().print(training_table(stored))
    console().print(checks_table([(setting.subject.model, training_checks([row.figures for row in stored]))]))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
