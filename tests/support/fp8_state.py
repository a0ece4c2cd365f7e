"""Small models whose products run in FP8, and all that such a step remembers."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import nn

from graphopt import fp8, optim
from tests.support.scaling import compiled, everything

RECIPES = {
    "tensorwise": fp8.Tensorwise(include=("*",)),
    "rowwise": fp8.Rowwise(include=("*",)),
    "blockwise": fp8.Blockwise(include=("*",)),
    "delayed": fp8.Delayed(history=4, include=("*",)),
}


class Blocks(nn.Module):
    """Two Linear(32, 32) blocks with batch normalisation between them, and a mean square loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layers[0](x))
        return {"loss": torch.tanh(self.layers[1](self.norm(hidden))).square().mean()}


def batches(count: int, *, rows: int = 16) -> list[dict[str, torch.Tensor]]:
    """Inputs [rows,32], the next twice as large as the one before."""
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(rows, 32, generator=generator) * 2.0**t} for t in range(count)]


def spoiled(batch: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    """``batch`` with one element replaced by ``value``."""
    x = batch["x"].clone()
    x[3, 5] = value
    return {"x": x}


def fp8_step(recipe: Any, model: nn.Module | None = None, **options: Any) -> Any:
    """A step that trains ``model`` (a copy of it, or new Blocks) under ``recipe``."""
    options.setdefault("optimizer", optim.AdamW(lr=1e-2))
    return compiled(Blocks() if model is None else copy.deepcopy(model), precision=recipe, **options)


@cache
def _compiled_once(recipe: Any, model: type[nn.Module], options: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    step = fp8_step(recipe, model(), **dict(options))
    return step, start_of(step)


def fresh_step(recipe: Any, model: type[nn.Module] = Blocks, **options: Any) -> Any:
    """A step that trains ``model``, as new; what is compiled is shared between tests that ask for the same."""
    step, start = _compiled_once(recipe, model, tuple(options.items()))
    restart(step, start)
    return step


def restart(step: Any, start: Any) -> None:
    """Set ``step`` and its model back to what ``start_of`` gave."""
    step.model.load_state_dict(copy.deepcopy(start[0]))
    step.load_state_dict(copy.deepcopy(start[1]))


def start_of(step: Any) -> Any:
    """What ``restart`` goes back to."""
    return copy.deepcopy((step.model.state_dict(), step.state_dict()))


def history_of(step: Any) -> dict[str, list[float]]:
    """The history of each tensor, the latest value first."""
    history = step.state.fp8.history
    return {} if history is None else {name: row.tolist() for name, row in history.rows().items()}


def remembered(step: Any) -> dict[str, Any]:
    """Parameters, buffers, optimizer state and histories, copied."""
    history = step.state.fp8.history
    rows = {} if history is None else {f"history.{name}": row for name, row in history.rows().items()}
    return {**everything(step), **copy.deepcopy(dict(step.model.named_buffers())), **rows}
