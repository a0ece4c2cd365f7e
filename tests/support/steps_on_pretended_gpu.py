"""Whole FP8 steps on a pretended GPU beside the CPU; a program, since the GPU must be there before torch is.

``python -m tests.support.steps_on_pretended_gpu LIBRARY`` prints one JSON object: for each case the losses on both, how
often the host read from the device in each call, and how many updates were skipped.
"""

# ruff: noqa: E402  (torch is imported once the GPU is there)

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.pretended_gpu import pretend_a_gpu

HOPPER = (9, 0)
host_reads = pretend_a_gpu(Path(sys.argv[1]), HOPPER)

import torch
from torch import nn
from torch.nn import functional

import graphopt
from graphopt.kernels import fp8_matmul_choice
from graphopt.optim import AdamW8bit

NUM_TOKENS, WIDTH, HIDDEN, TEXTS, LENGTH, STEPS = 64, 48, 96, 3, 16, 4


class Model(nn.Module):
    """A residual block between embedding and head; ``scale`` lets a batch make everything infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        # Of 4,608 elements each: their state is kept in 8 bits.
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(ids) * scale
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        return {"loss": functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())}


@dataclass(frozen=True)
class Ran:
    """``reads``: by the host, in each call; ``skipped``: updates, of which one has an infinite batch."""

    losses: tuple[float, ...]
    reads: tuple[int, ...]
    skipped: int


def compiled(recipe: graphopt.fp8.Recipe, device: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16).to(device)
    optimizer = AdamW8bit(lr=1e-2)
    step = graphopt.compile(model, outputs=["loss"], optimizer=optimizer, precision=recipe, backend="aten", **options)
    return model, step


def ran(recipe: graphopt.fp8.Recipe, device: str, *, resumes: bool, **options: Any) -> Ran:
    """STEPS micro-steps, the second on an infinite batch; ``resumes``: from a file, in the middle."""
    model, step = compiled(recipe, device, options)
    generator = torch.Generator().manual_seed(1)
    losses, reads = [], []
    for number in range(STEPS):
        ids, labels = (torch.randint(0, NUM_TOKENS, (TEXTS, LENGTH), generator=generator) for _ in range(2))
        scale = torch.tensor(float("inf") if number == 1 else 1.0, dtype=torch.bfloat16)
        before = host_reads()
        out = step(ids=ids.to(device), labels=labels.to(device), scale=scale.to(device))
        reads.append(host_reads() - before)
        losses.append(out.loss)
        if resumes and number == STEPS // 2:
            with TemporaryDirectory() as folder:
                step.save(Path(folder) / "checkpoint")
                model, step = compiled(recipe, device, options)
                graphopt.load_checkpoint(Path(folder) / "checkpoint", model=model, step=step)
    step.state_dict()  # finds out about the last update
    return Ran(tuple(map(float, losses)), tuple(reads), step.state.skipped)


def always(facts: graphopt.fp8.ProductFacts) -> bool:
    return True


def cases() -> Iterator[tuple[str, graphopt.fp8.Recipe, dict[str, Any]]]:
    fp8 = graphopt.fp8
    yield "tensorwise", fp8.Tensorwise(choose=always), {"resumes": False}
    yield (
        "rowwise, windows of two, clipped",
        fp8.Rowwise(choose=always),
        {
            "resumes": True,
            "accumulate": 2,
            "clip_grad_norm": 1.0,
        },
    )
    yield "blockwise, resumed", fp8.Blockwise(choose=always), {"resumes": True}
    yield "delayed, windows of two, resumed", fp8.Delayed(choose=always, history=3), {"resumes": True, "accumulate": 2}


def main() -> None:
    fp8_matmul_choice.WARM_UP_RUNS, fp8_matmul_choice.TIMED_RUNS = 0, 1
    fp8_matmul_choice._scaled_mm_takes = lambda product: False  # here it would be the CPU's
    found = {}
    for name, recipe, options in cases():
        # Products need two layouts there, and the device decides what is skipped; so they do here.
        on_cpu = ran(replace(recipe, target="H100", decides="device"), "cpu", **options)
        found[name] = {"cpu": asdict(on_cpu), "gpu": asdict(ran(recipe, "cuda", **options))}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
