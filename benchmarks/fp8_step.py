"""A training step of a Llama of about a billion parameters in bf16 and in FP8: its peak, predicted and measured.

``python -m benchmarks.fp8_step [--precisions bf16,tensorwise] [--rounds N] [--tiny]``

Weights are random. Four layers have the shapes of Llama 3 8B, so that products are those of real models and compiling
takes seconds. The optimizer is AdamW8bit. The peak is that of the allocator in a steady step, above parameters,
optimizer state and batch; the predicted one is that of the plan. Without a GPU the model is tiny and FP8 is emulated.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

import graphopt
from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.command import Results, Rounds, console, run_command, seed_weights
from benchmarks.device import device_slug, measured_device, seconds_of
from benchmarks.fp8_training import PRECISIONS, chosen_recipes
from benchmarks.machine import this_machine
from benchmarks.measure import model_tensors, optimizer_tensors, storage_bytes
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from benchmarks.steps import first_line
from graphopt.errors import UnsupportedError
from graphopt.execute.measure import measure_memory
from graphopt.ir.liveness import saved_bytes
from graphopt.optim import AdamW8bit

_DEFAULT_PRECISIONS = "bf16,tensorwise"
_DEFAULT_ROUNDS = 5
# The first step compiles and makes the optimizer's state; kernels are chosen by measurement until the second has run.
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class LlamaSize:
    """Names as in transformers; a batch of ``batch_size`` texts of ``length`` tokens."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    batch_size: int
    length: int

    def make_model(self) -> nn.Module:
        """The model with random weights, on the default device. UnsupportedError without transformers."""
        if find_spec("transformers") is None:
            raise UnsupportedError("the step is that of a transformers model, and there is no transformers: install it")
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.length,
        )
        return LlamaForCausalLM(config)

    def make_batch(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """Random tokens, learnt as they are."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (self.batch_size, self.length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids}


LARGE = LlamaSize("llama-1b", 4096, 14336, 4, 32, 8, 32000, 4, 2048)
TINY = LlamaSize("llama-tiny", 128, 256, 2, 4, 2, 256, 2, 64)


@dataclass(frozen=True)
class Fp8StepFigures:
    """One precision. Peaks are above ``resting_bytes``; what does not exist is None, and ``note`` says why."""

    precision: str
    device: str
    num_fp8_products: int = 0
    num_products: int = 0
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    resting_bytes: int | None = None
    saved_bytes: int | None = None
    first_step_seconds: float | None = None
    seconds: tuple[float, ...] = ()
    loss: float | None = None
    note: str = ""


def measure_steps(
    size: LlamaSize, precisions: Sequence[str], rounds: int, device: torch.device
) -> Iterator[Row[Fp8StepFigures]]:
    """The rows of ``size``; whatever stops a precision becomes its note."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in size.make_model().parameters())
    subject = Subject(size.name, count, f"ids i64[{size.batch_size},{size.length}]", ("loss",))
    machine = this_machine()
    for precision in precisions:
        figures = Fp8StepFigures(precision, device_slug(device))
        try:
            figures = _measured(figures, size, rounds, device)
        except Exception as error:  # a failure is the precision's result; the others are still to be measured
            figures = replace(figures, note=first_line(error))
        yield Row(subject, machine, figures)
        gc.collect()


def _measured(figures: Fp8StepFigures, size: LlamaSize, rounds: int, device: torch.device) -> Fp8StepFigures:
    seed_weights()
    with device:
        model = size.make_model()
    batch = size.make_batch(device)
    step: Any = graphopt.compile(
        model,
        outputs=["loss"],
        optimizer=AdamW8bit(lr=1e-4),
        precision=PRECISIONS[figures.precision],
        backend="aten",
    )
    started = time.perf_counter()
    loss = float(step(**batch).loss)
    first_step_seconds = time.perf_counter() - started
    for _ in range(_WARM_UP_STEPS - 1):
        step(**batch)
    gc.collect()
    memory = measure_memory(lambda: step(**batch), device=device)
    program, table = step.last_executable.program, step.report().fp8
    return replace(
        figures,
        num_fp8_products=len(table.eligible),
        num_products=len(table.rows),
        predicted_peak_bytes=step.last_executable.plan.peak_bytes,
        measured_peak_bytes=memory.peak_bytes,
        resting_bytes=storage_bytes([*model_tensors(model, dict(batch)), *optimizer_tensors(step.optimizer)]),
        saved_bytes=saved_bytes(program),
        first_step_seconds=first_step_seconds,
        seconds=seconds_of(lambda: step(**batch), rounds, device),
        loss=loss,
    )


def step_table(rows: Sequence[Row[Fp8StepFigures]]) -> Table:
    """One line for each precision."""
    table = Table("precision")
    headings = ("products in FP8", "at rest", "saved", "predicted peak", "measured peak", "ratio", "first step", "step")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("note")
    for row in rows:
        figures = row.figures
        median = statistics.median(figures.seconds) if figures.seconds else None
        table.add_row(
            figures.precision,
            f"{figures.num_fp8_products} of {figures.num_products}" if figures.num_products else "none",
            bytes_cell(figures.resting_bytes),
            bytes_cell(figures.saved_bytes),
            bytes_cell(figures.predicted_peak_bytes),
            bytes_cell(figures.measured_peak_bytes),
            ratio_cell(figures.predicted_peak_bytes, figures.measured_peak_bytes),
            seconds_cell(figures.first_step_seconds),
            seconds_cell(median),
            figures.note,
        )
    return table


def main(
    precisions: Annotated[str, typer.Option(help="bf16 and FP8 recipes, with commas.")] = _DEFAULT_PRECISIONS,
    rounds: Rounds = _DEFAULT_ROUNDS,
    tiny: Annotated[bool, typer.Option(help="The tiny model on a GPU too.")] = False,
    results: Results = RESULTS,
) -> None:
    """Measure whole training steps in bf16 and FP8."""
    device, chosen = measured_device(), chosen_recipes(precisions)
    size = TINY if tiny or device.type == "cpu" else LARGE
    path = results / f"fp8-step-{device_slug(device)}-{'-'.join(chosen)}.jsonl"
    rows = tuple(store_rows(path, measure_steps(size, chosen, rounds, device)))
    console().print(f"{size.name}, {rows[0].subject.num_parameters / 1e6:,.1f} M parameters, {rows[0].subject.batch}")
    console().print(step_table(rows))
    if any(row.figures.note for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
