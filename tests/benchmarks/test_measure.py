"""Bytes of a step as the benchmarks count them."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.measure import interleaved_seconds, measure_step, saved_by_autograd, storage_bytes
from benchmarks.peers import eager_contender

KIB = 1024


def test_a_storage_counts_once_and_whole() -> None:
    base = torch.zeros(KIB // 4)

    assert storage_bytes([base, base[:3], base.view(2, -1)]) == KIB


def test_saved_bytes_leave_out_parameters_and_the_batch() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)

    saved = saved_by_autograd(lambda: (x @ weight).exp().sum(), resident=[weight, x])

    assert saved == 8 * 8 * 4  # the result of exp; mm saves its inputs, sum saves nothing


class OneWeight(nn.Module):
    """w * x, 1 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(KIB // 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss alone."""
        return {"loss": (self.weight * x).sum()}


def test_eager_rests_with_parameter_batch_and_two_moments() -> None:
    model, batch = OneWeight(), {"x": torch.zeros(KIB // 4)}

    memory = measure_step(eager_contender(model, batch), model, batch)

    assert memory.resting_bytes == 4 * KIB + 4  # and AdamW's step count, one float32
    assert model.weight.grad is None


def test_each_round_runs_every_step_in_turn() -> None:
    ran: list[str] = []

    seconds = interleaved_seconds({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 2)

    assert ran == ["a", "b", "a", "b"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
