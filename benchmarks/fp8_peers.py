"""FP8 training of Llama blocks by torchao and here: measured peaks, what a block adds to them, decibels of gradients.

``python -m benchmarks.fp8_peers [--width 512] [--tokens 1024] [--layers 4]``

One model in bf16, forward and backward, no optimizer; every way trains the same weights on one batch, blocks in FP8
and the head not. torchao as it comes and under torch.compile, which computes pointwise values again as it sees fit;
graphopt computes nothing again, but in the way that says which checkpoints it has. Peaks are the allocator's
events above parameters and batch; what a block adds is the peak of ``layers`` blocks less that of one block fewer. On a
CPU both emulate FP8: torchao in the dtype of the operands. Decibels are those of the worst gradient,
20 log10(|g| / |g - h|), against the same weights in float32. Without torchao its ways are left out, with a line that
says so.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

import graphopt
from benchmarks.command import Results, console, run_command
from benchmarks.eight_bit_peers import NOT_INSTALLED, TORCHAO
from benchmarks.fp8_peers_table import PeerFigures, peers_table
from benchmarks.fp8_saved import BATCH, DYNAMIC, Bench, LlamaBlocks, recipe, worst
from benchmarks.fp8_saved_table import HEADS
from benchmarks.machine import this_machine
from benchmarks.peers import EAGER, GRAPHOPT, TORCH_COMPILE
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from graphopt.execute.measure import measure_memory
from graphopt.precision import Precision

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_EVERY_BLOCK = graphopt.checkpoint.EveryN(1)

Forward = Callable[..., Any]


def ways() -> dict[str, Callable[[LlamaBlocks], Forward]]:
    """By name, how to make of a model what computes its loss. The first is eager."""
    found: dict[str, Callable[[LlamaBlocks], Forward]] = {EAGER: lambda model: model}
    if importlib.util.find_spec(TORCHAO) is not None:
        found |= {f"{TORCHAO} {name}": _by_torchao(name) for name in TORCHAO_RECIPES}
        found |= {f"{TORCHAO} {name}, {TORCH_COMPILE}": _by_torchao(name, torch.compile) for name in TORCHAO_RECIPES}
    found[f"{GRAPHOPT} bf16"] = _compiled(Precision(compute="bf16"))
    found |= {f"{GRAPHOPT} {name}": _compiled(Precision(compute="fp8", fp8=recipe(name, "all"))) for name in DYNAMIC}
    found[f"{GRAPHOPT} rowwise, {_EVERY_BLOCK}"] = _compiled(
        Precision(compute="fp8", fp8=recipe("rowwise", "all")), checkpoint=_EVERY_BLOCK
    )
    return found


def _by_torchao(name: str, wrap: Callable[[Any], Any] = lambda model: model) -> Callable[[LlamaBlocks], Forward]:
    def convert(model: LlamaBlocks) -> Forward:
        float8 = importlib.import_module(f"{TORCHAO}.float8")
        config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(name), emulate=True)
        float8.convert_to_float8_training(model.layers, config=config)
        forward: Forward = wrap(model)
        return forward

    return convert


def _compiled(precision: Precision, **options: Any) -> Callable[[LlamaBlocks], Forward]:
    return lambda model: graphopt.compile(model, outputs=["loss"], precision=precision, backend="aten", **options)


@dataclass(frozen=True)
class Trained:
    """Forward and backward of one way, already run once: measured peak, gradients by the parameter's name."""

    peak_bytes: int
    gradients: dict[str, torch.Tensor]


def train(model: LlamaBlocks, make: Callable[[LlamaBlocks], Forward], batch: dict[str, torch.Tensor]) -> Trained:
    """Run forward and backward twice, the first time to compile; measure the second."""
    forward = make(model)

    def run() -> None:
        forward(**batch)["loss"].backward()

    run()
    model.zero_grad()
    gc.collect()
    peak_bytes = measure_memory(run).peak_bytes
    return Trained(peak_bytes, dict(_gradients(model)))


def _gradients(model: LlamaBlocks) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.layers.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


def measure(bench: Bench, layers: int) -> Iterator[PeerFigures]:
    """Every way, eager first."""
    batch, eager = bench.batch(), None
    exact = train(_bf16_model(bench, layers).float(), ways()[EAGER], batch).gradients
    for name, make in ways().items():
        fewer, full = (train(_bf16_model(bench, count), make, batch) for count in (layers - 1, layers))
        block_bytes = full.peak_bytes - fewer.peak_bytes
        eager = eager or (full.peak_bytes, block_bytes)
        yield PeerFigures(name, full.peak_bytes, block_bytes, *eager, *worst(exact, full.gradients))


def _bf16_model(bench: Bench, layers: int) -> LlamaBlocks:
    return bench.model(layers).to(torch.bfloat16)


def measure_rows(width: int, tokens: int, layers: int) -> Iterator[Row[PeerFigures]]:
    """A row for each way."""
    bench, machine = Bench(width, tokens, HEADS), this_machine()
    size = sum(parameter.numel() for parameter in bench.model(layers).parameters())
    subject = Subject(f"{layers} llama-block-{width}", size, f"{BATCH} x {tokens // BATCH} positions", ("loss",))
    for figures in measure(bench, layers):
        yield Row(subject, machine, figures)


def main(
    width: Annotated[int, typer.Option(min=128, help="The hidden size, a multiple of 128.")] = 512,
    tokens: Annotated[int, typer.Option(min=32, help="Positions of both sequences together.")] = 1024,
    layers: Annotated[int, typer.Option(min=2, help="How many blocks.")] = 4,
    results: Results = RESULTS,
) -> None:
    """Measure the peaks of FP8 training by torchao and by graphopt."""
    if importlib.util.find_spec(TORCHAO) is None:
        console().print(f"{TORCHAO} is {NOT_INSTALLED}: pip install {TORCHAO}. Its ways are left out.")
    path = results / f"fp8-peers-{width}x{tokens}.jsonl"
    console().print(peers_table(tuple(store_rows(path, measure_rows(width, tokens, layers)))))
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
