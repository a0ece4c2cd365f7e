"""Other ways to spend time for memory: transformers' gradient checkpointing, torch.compile with a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from benchmarks.memory_settings import split_list
from benchmarks.models import Batch
from benchmarks.peers import TORCH_COMPILE, Contender, torch_compile_contender, torch_contender
from graphopt.errors import DataError, UnsupportedError

GRADIENT_CHECKPOINTING = "gradient checkpointing"
DEFAULT_PEERS = "checkpointing,compile,compile-0.5,compile-0.2"
_CHECKPOINTING, _COMPILE = "checkpointing", "compile"
# torch.compile's own default, at which it plans by its cut alone.
_NO_BUDGET = 1.0

MakeContender = Callable[[nn.Module, Batch], Contender]


def chosen_peers(text: str) -> dict[str, MakeContender]:
    """By name, how to make the peers of a list such as ``checkpointing,compile,compile-0.5``."""
    return dict(_chosen_peer(part) for part in split_list(text))


def gradient_checkpointing_contender(model: nn.Module, batch: Batch) -> Contender:
    """Eager with transformers' checkpointing of every layer, at its defaults; switched on only while it runs."""
    if not hasattr(model, "activation_checkpointing_enable"):
        raise UnsupportedError(f"{type(model).__name__} has no gradient checkpointing of its own")
    inner = torch_contender(GRADIENT_CHECKPOINTING, model, model, batch)

    def step() -> Any:
        # The model is shared with other contenders. Walking over its modules takes well below a millisecond.
        _switch_on(model)
        try:
            return inner.step()
        finally:
            _switch_off(model)

    return Contender(GRADIENT_CHECKPOINTING, step, inner.optimizer)


def budgeted_compile_contender(model: nn.Module, batch: Batch, budget: float) -> Contender:
    """torch.compile with ``activation_memory_budget``; compiles at the first step."""
    inner = torch_compile_contender(model, batch)

    def step() -> Any:
        # Read when the backward is planned, which may be at any step.
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return inner.step()

    return Contender(compile_name(budget), step, inner.optimizer)


def compile_name(budget: float) -> str:
    """What rows call torch.compile with ``budget``."""
    return TORCH_COMPILE if budget == _NO_BUDGET else f"{TORCH_COMPILE} budget {budget:g}"


def is_compile_peer(name: str) -> bool:
    """Whether ``name`` is torch.compile, with a budget or without."""
    return name.startswith(TORCH_COMPILE)


def _switch_on(model: Any) -> None:
    # gradient_checkpointing_enable under its name from transformers 5 on; use_reentrant=False is the default.
    model.activation_checkpointing_enable()


def _switch_off(model: Any) -> None:
    model.activation_checkpointing_disable()
    # transformers 5.24 leaves the hook that it puts on the embeddings behind; compiled steps refuse hooks.
    model.disable_input_require_grads()


def _chosen_peer(part: str) -> tuple[str, MakeContender]:
    if part == _CHECKPOINTING:
        return GRADIENT_CHECKPOINTING, gradient_checkpointing_contender
    kind, _, share = part.partition("-")
    try:
        budget = float(share or _NO_BUDGET)
    except ValueError:
        budget = -1.0
    if kind != _COMPILE or not 0 <= budget <= _NO_BUDGET:
        raise DataError(f"--peers expects checkpointing, compile, compile-SHARE such as compile-0.5; came {part!r}")
    return compile_name(budget), lambda model, batch: budgeted_compile_contender(model, batch, budget)
