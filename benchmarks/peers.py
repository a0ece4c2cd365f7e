"""What graphopt is compared with, and graphopt itself: training loops that share one model and one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import graphopt
from benchmarks.models import Batch
from graphopt.execute.step import TrainStep

EAGER = "eager"
TORCH_COMPILE = "torch.compile"
GRAPHOPT = "graphopt"


@dataclass(frozen=True)
class Contender:
    """One way to train: ``step()`` is a whole training step; ``optimizer`` holds what stays between steps.

    ``forward()``: the part whose results autograd saves; None where no autograd takes part.
    """

    name: str
    step: Callable[[], Any]
    optimizer: torch.optim.Optimizer
    forward: Callable[[], Any] | None = None


def eager_contender(model: nn.Module, batch: Batch) -> Contender:
    """PyTorch as it comes, with torch.optim.AdamW at its defaults."""
    return torch_contender(EAGER, model, model, batch)


def torch_compile_contender(model: nn.Module, batch: Batch) -> Contender:
    """The same loop around ``torch.compile(model)`` with its defaults; compiles at the first step, which may fail."""
    return torch_contender(TORCH_COMPILE, torch.compile(model), model, batch)


def graphopt_step(
    model: nn.Module,
    outputs: Sequence[str],
    *,
    backend: str = "aten",
    optimizer: graphopt.optim.Optimizer | None = None,
    **options: Any,
) -> TrainStep:
    """``graphopt.compile`` with ``options`` and its defaults, which compiles at the first step; ``optimizer`` None: the
    same as eager's."""
    chosen = optimizer or graphopt.optim.AdamW()
    step: TrainStep = graphopt.compile(model, outputs=outputs, optimizer=chosen, backend=backend, **options)
    return step


def train_step_contender(step: TrainStep, batch: Batch) -> Contender:
    """A compiled TrainStep on ``batch``."""
    return Contender(GRAPHOPT, lambda: step(**batch), step.optimizer)


def torch_contender(
    name: str,
    forward: Callable[..., Any],
    model: nn.Module,
    batch: Batch,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> Contender:
    """The training loop that people write, around ``forward``, which trains the parameters of ``model``; ``optimizer``
    None: torch.optim.AdamW at its defaults."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())

    def step() -> Any:
        # ``out`` is a local name up to the end, as in the loops people write: its tensors live through the backward.
        out = forward(**batch)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out

    return Contender(name, step, optimizer, lambda: forward(**batch))
