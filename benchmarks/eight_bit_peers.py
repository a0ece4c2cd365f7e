"""Public optimizers with 8-bit state, of packages that may be missing: the extra ``bench`` brings them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.models import Batch
from benchmarks.peers import Contender, torch_contender
from graphopt.errors import UnsupportedError

TORCHAO = "torchao"
BITSANDBYTES = "bitsandbytes"
NOT_INSTALLED = "not installed"

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw_8bit(package: str) -> MakeOptimizer:
    """AdamW8bit of ``package`` with its own defaults; UnsupportedError where the package is missing."""
    if importlib.util.find_spec(package) is None:
        raise UnsupportedError(f"{NOT_INSTALLED}: pip install {package}")
    make: MakeOptimizer = importlib.import_module(f"{package}.optim").AdamW8bit
    return make


def low_precision_contender(name: str, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Contender:
    """The recipe that people use: bf16 autocast, transformers' checkpointing of every layer, ``optimizer``.

    The model is this contender's own: its checkpointing stays on. UnsupportedError for one that has none.
    """
    if not hasattr(model, "activation_checkpointing_enable"):
        raise UnsupportedError(f"{type(model).__name__} has no gradient checkpointing of its own")
    model.activation_checkpointing_enable()

    def forward(**inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**inputs)

    return torch_contender(name, loss_alone(forward), model, batch, optimizer=optimizer)


def loss_alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` that lets go of all outputs but the loss before the backward: the thriftiest loop."""
    return lambda **inputs: {"loss": forward(**inputs)["loss"]}
