"""A small model, optimizers that keep its state in every format, and runs of them, for tests of state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.optim.state import Weights

SMALL: dict[str, Any] = {"min_8bit_size": 64, "block": 64, "groups": [{"params": ["vector"], "state": "int8"}]}

OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": optim.Adam(lr=1e-2, weight_decay=0.05),
    "adamw": optim.AdamW(lr=1e-2, weight_decay=0.05),
    "lion": optim.Lion(lr=1e-3, weight_decay=0.05),
    "adamw-bf16": optim.AdamW(lr=1e-2, state="bf16"),
    "lion-bf16": optim.Lion(lr=1e-3, state="bf16"),
    "adam8bit": optim.Adam8bit(lr=1e-2, weight_decay=0.05, **SMALL),
    "adamw8bit": optim.AdamW8bit(lr=1e-2, weight_decay=0.05, **SMALL),
    "adamw8bit-linear": optim.AdamW8bit(lr=1e-2, map="linear", **SMALL),
    "adamw8bit-dynamic": optim.AdamW8bit(lr=1e-2, map="dynamic", **SMALL),
    "adamw8bit-nearest": optim.AdamW8bit(lr=1e-2, stochastic_state=False, **SMALL),
    "lion8bit": optim.Lion8bit(lr=1e-3, **SMALL),
}


class Odd(nn.Module):
    """Parameters (7, 13), (300,), (3,) and a table (11, 13) looked up: enough of each for several blocks of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 13)
        self.matrix = nn.Parameter(torch.randn(7, 13) / 4)
        self.vector = nn.Parameter(torch.randn(300) / 4)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.table(ids) @ self.matrix.t())
        mixed = hidden.repeat(1, 43)[:, :300] * self.vector
        rest = mixed.reshape(len(ids), 100, 3).mean(1) + self.bias
        return {"loss": rest.float().square().mean() + mixed.float().mean()}


def odd_model(dtype: torch.dtype = torch.float32) -> Odd:
    """The model from seed 0."""
    torch.manual_seed(0)
    return Odd().to(dtype)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of 5, all different."""
    generator = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(0, 11, (5,), generator=generator)} for _ in range(count)]


def step_of(model: nn.Module, optimizer: optim.Optimizer, weights: Weights = Weights.OWN, **options: Any) -> Any:
    """A compiled step of ``model``; ``weights``: what is done for parameters of two bytes an element."""
    precision = graphopt.Precision(compute="fp32", master=weights.value)
    return graphopt.compile(
        model, outputs=["loss"], optimizer=optimizer, backend="aten", precision=precision, **options
    )


def run(step: Any, items: Sequence[dict[str, torch.Tensor]]) -> None:
    """One step on each batch."""
    for batch in items:
        step(**batch)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in dtype and in every bit."""
    same_kind = first.dtype == second.dtype and first.shape == second.shape
    return same_kind and first.contiguous().view(-1).view(torch.uint8).equal(
        second.contiguous().view(-1).view(torch.uint8)
    )


def state_of(step: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Copies of the state tensors by parameter name."""
    return {
        name: {
            key: value.clone() for key, value in step.state.facade.state[parameter].items() if torch.is_tensor(value)
        }
        for name, parameter in step.state.known.items()
    }


def same_state(first: dict[str, dict[str, torch.Tensor]], second: dict[str, dict[str, torch.Tensor]]) -> bool:
    """Whether both hold the same tensors, bit by bit and so in the same number of bytes."""
    return {name: set(values) for name, values in first.items()} == {
        name: set(values) for name, values in second.items()
    } and all(same_bits(value, second[name][key]) for name, values in first.items() for key, value in values.items())


def assert_same_run(first: Any, second: Any) -> None:
    """Parameters and every state tensor are equal bit by bit."""
    for (name, mine), (_, its) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert same_bits(mine.detach(), its.detach()), name
    assert same_state(state_of(first), state_of(second))
