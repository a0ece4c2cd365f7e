"""What a Llama block leaves for its backward part, in bf16 and in FP8, and what keeping it in FP8 does to gradients.

``python -m benchmarks.fp8_saved [--width 512] [--tokens 256] [--attention]``

A transformers Llama decoder block: what two blocks leave, less what one leaves, so that head and loss do not count.
Activations and copies of weights apart, checkpoint=None everywhere, before anything is computed again. Accuracy is that
of the gradients of two blocks, worst weight first: 20 log10(|g| / |g - h|) decibels, against float32, and against the
same recipe with saved="none", which is what keeping in FP8 alone does. The peak is that of forward and backward above
parameters and batch, measured on the allocator. ``--attention``: why attention's operands are kept in two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from rich import box
from rich.table import Table
from torch import nn
from transformers.models.llama import modeling_llama

import graphopt
from benchmarks.command import Results, console, run_command
from benchmarks.fp8_saved_table import HEADS, SavedFigures, saved_table
from benchmarks.machine import this_machine
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from graphopt.fp8 import RECIPES, Recipe
from graphopt.ir.kept_values import ForwardValue, forward_values
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import InputKind
from graphopt.kernels.fp8_format import decode, encode, format_named, group_amax, scale_of
from graphopt.pipeline.default import default_pipeline
from graphopt.precision import Precision

BF16, HEAD = "bf16", "head"
DYNAMIC = ("tensorwise", "rowwise", "blockwise")
SAVED = ("none", "products", "all")
BATCH = 2
GROUPED = 2
_BOUND = 0.6
_SEED = 0
_SHARPNESS = (1.0, 4.0, 16.0, 64.0)


class LlamaBlocks(nn.Module):
    """``layers`` decoder blocks and a head; x bf16[B,T,D]."""

    def __init__(self, width: int, tokens: int, key_value_heads: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(_SEED)
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_attention_heads=HEADS,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=tokens,
            attn_implementation="sdpa",
        )
        self.table = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(modeling_llama.LlamaDecoderLayer(config, i) for i in range(layers))
        self.rotary = modeling_llama.LlamaRotaryEmbedding(config)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """ids i64[B,T], target f32[B,T,D]."""
        x = self.table(ids)
        positions = self.rotary(x, torch.arange(ids.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        return {"loss": (self.head(x).float() - target).square().mean()}


@dataclass(frozen=True)
class Bench:
    """Blocks of ``width`` on ``tokens`` positions of a batch of two."""

    width: int
    tokens: int
    key_value_heads: int

    def model(self, layers: int) -> LlamaBlocks:
        """The same weights each time."""
        return LlamaBlocks(self.width, self.tokens // BATCH, self.key_value_heads, layers)

    def batch(self) -> dict[str, torch.Tensor]:
        """The same numbers each time."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (BATCH, self.tokens // BATCH)
        ids = torch.randint(0, self.tokens // BATCH, shape, generator=generator)
        return {"ids": ids, "target": torch.randn(*shape, self.width, generator=generator)}

    def kept(self, precision: Precision) -> tuple[int, int]:
        """Bytes of activations and of copies of weights that one block leaves for the backward part."""
        one, two = (kept_bytes(self._joint(precision, layers)) for layers in (1, 2))
        return two[0] - one[0], two[1] - one[1]

    def _joint(self, precision: Precision, layers: int) -> Program:
        model = self.model(layers)
        program = graphopt.capture(model, self.batch(), outputs=["loss"])
        forward = default_pipeline(Stage.FORWARD, precision=precision).run(program)
        names = [name for name, _ in model.named_parameters()]
        joint = graphopt.differentiate(forward, roots=["loss"], wrt=names)
        return default_pipeline(Stage.JOINT, precision=precision).run(joint)

    def gradients(self, precision: Precision | str) -> tuple[dict[str, torch.Tensor], int]:
        """The gradients of two blocks, and the peak of computing them."""
        model = self.model(2)
        step = graphopt.compile(model, outputs=["loss"], precision=precision, backend="aten")
        step(**self.batch()).loss.backward()
        found = {name: each.grad.clone() for name, each in model.layers.named_parameters() if each.grad is not None}
        peak = step.report(measure=True).measured_peak_bytes
        assert peak is not None, "it was measured"
        return found, peak

    def measure(self) -> Iterator[SavedFigures]:
        """bf16, then each recipe with each choice of what is saved."""
        exact, _ = self.gradients("fp32")
        base, weights = self.kept(Precision(compute=BF16))
        found, peak = self.gradients(BF16)
        yield SavedFigures(BF16, "", self.key_value_heads, base, weights, base, *worst(exact, found), None, peak)
        for name in DYNAMIC:
            unsaved: dict[str, torch.Tensor] = {}
            for saved in SAVED:
                precision = Precision(compute="fp8", fp8=recipe(name, saved))
                activations, weights = self.kept(precision)
                found, peak = self.gradients(precision)
                unsaved = unsaved or found
                alone = None if found is unsaved else worst(unsaved, found)[0]
                heads = self.key_value_heads
                yield SavedFigures(name, saved, heads, activations, weights, base, *worst(exact, found), alone, peak)


def recipe(name: str, saved: str) -> Recipe:
    """The recipe called ``name`` with every product of the blocks in FP8, whatever it costs here."""
    return RECIPES[name](saved=saved, include=("layers.*",), exclude=(HEAD,))  # type: ignore[arg-type]


def kept_bytes(program: Program) -> tuple[int, int]:
    """Bytes that the forward part leaves: what depends on the batch, and what does not."""
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    varying = {node for node, entry in inputs if entry.kind is InputKind.BATCH}
    for node in program.ops():
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)

    def nbytes(values: list[ForwardValue]) -> int:
        return sum(value.nbytes for value in values)

    kept = [value for value in forward_values(program) if value.is_kept]
    activations = [value for value in kept if value.base in varying]
    return nbytes(activations), nbytes(kept) - nbytes(activations)


def worst(exact: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The fewest decibels of a gradient, and whose it is."""
    return min((decibels(exact[name], found[name]), name) for name in exact)


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    """``20 log10(|exact| / |exact - found|)``."""
    noise = (exact.double() - found.double()).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(exact.double().norm().item() / noise)


# ---- attention ---------------------------------------------------------------------------------------------------


def attention_decibels(sharpness: float, *, values: bool, output: bool) -> float:
    """Decibels of the gradient of the queries when values or output of attention come from FP8 in its backward.

    ``sharpness``: queries are so much larger than normal numbers are. f32[2,8,128,64], causal.
    """
    torch.manual_seed(_SEED)
    query, key, value, gradient = (torch.randn(2, HEADS, 128, 64) for _ in range(4))
    query = query * sharpness
    out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)

    def query_gradient(v: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: tuple[Any, ...] = backward(gradient, query, key, v, o, normaliser, 0.0, True)
        return found[0]

    rounded = query_gradient(_through_fp8(value) if values else value, _through_fp8(out) if output else out)
    return decibels(query_gradient(value, out), rounded)


def _through_fp8(x: torch.Tensor) -> torch.Tensor:
    rows, kind = x.contiguous().view(-1, 128), format_named("e4m3")
    scale = scale_of(group_amax(rows, (1, 128)), kind, power_of_two=True)
    return decode(encode(rows, scale, (1, 128), kind), scale, (1, 128)).view(x.shape)


def attention_table() -> Table:
    """Decibels of the queries' gradient, by how sharp attention is."""
    table = Table("queries larger by", box=box.HEAVY_HEAD, title="decibels of the gradient of the queries")
    for heading in ("values in FP8", "output in FP8", "both"):
        table.add_column(heading, justify="right")
    for sharpness in _SHARPNESS:
        cells = (
            f"{attention_decibels(sharpness, values=values, output=output):.1f}"
            for values, output in ((True, False), (False, True), (True, True))
        )
        table.add_row(f"{sharpness:g}", *cells)
    return table


# ---- rows --------------------------------------------------------------------------------------------------------


def measure_rows(width: int, tokens: int) -> Iterator[Row[SavedFigures]]:
    """Rows of a block with a key head for each query head, and of one with two."""
    machine = this_machine()
    for heads in (HEADS, GROUPED):
        bench = Bench(width, tokens, heads)
        size = sum(parameter.numel() for parameter in bench.model(1).layers.parameters())
        subject = Subject(f"llama-block-{width}", size, f"{BATCH} x {tokens // BATCH} positions", ("loss",))
        for figures in bench.measure():
            yield Row(subject, machine, figures)


def main(
    width: Annotated[int, typer.Option(min=128, help="The hidden size, a multiple of 128.")] = 512,
    tokens: Annotated[int, typer.Option(min=32, help="Positions of both sequences together.")] = 256,
    attention: Annotated[bool, typer.Option(help="Show what FP8 does to attention's backward, and stop.")] = False,
    results: Results = RESULTS,
) -> None:
    """Measure what a Llama block keeps for its backward part."""
    if attention:
        console().print(attention_table())
        return
    path = results / f"fp8-saved-{width}x{tokens}.jsonl"
    stored = tuple(store_rows(path, measure_rows(width, tokens)))
    console().print(saved_table(stored))
    smallest = max(
        row.figures.activation_bytes / row.figures.base_bytes for row in stored if row.figures.saved == "all"
    )
    console().print(f"saved='all' keeps at most {smallest:.2f} of bf16's activations; the bound is {_BOUND}")
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
