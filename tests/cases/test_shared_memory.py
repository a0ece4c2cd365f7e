"""Parameters that overlap in memory without being one parameter, and batches that lie in a parameter's memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import UnsupportedError


class Transposed(nn.Module):
    """Two parameters, one the transpose of the other in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last.weight = nn.Parameter(self.middle.weight.detach().t())

    def forward(self, x):
        return {"loss": self.last(self.middle(self.first(x).tanh()).tanh()).square().mean()}


class Part(nn.Module):
    """A parameter that is the upper half of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.whole = nn.Parameter(torch.randn(16, 8))
        self.upper = nn.Parameter(self.whole.detach()[:8])

    def forward(self, x):
        hidden = (self.first(x) @ self.whole.t()).tanh()
        return {"loss": (hidden[:, :8] @ self.upper).square().mean()}


class Looked(nn.Module):
    """A buffer that shows a parameter's memory, read late in the backward part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("view", self.last.weight.detach())

    def forward(self, x):
        return {"loss": self.last((self.first(x) @ self.view).tanh()).square().mean()}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make", [Transposed, Part, Looked])
def test_overlapping_parameters_train_as_in_eager(make, clip):
    torch.manual_seed(0)
    model, twin = make(), make()
    with torch.no_grad():
        for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    step = graphopt.compile(
        model, ["loss"], optimizer=optim.AdamW(lr=0.1, weight_decay=0.1), clip_grad_norm=clip, backend="auto"
    )
    eager = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1, foreach=False)
    for _ in range(3):
        x = torch.randn(16, 8)
        loss = step(x).loss
        eager.zero_grad()
        wanted = twin(x)["loss"]
        wanted.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), clip, foreach=False)
        eager.step()
        assert torch.equal(loss, wanted.detach())
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, its)
    assert "overlap" in step.report().backend_reason


def test_regions_are_refused_for_overlapping_parameters():
    step = graphopt.compile(Part(), ["loss"], optimizer=optim.SGD(lr=0.1), backend="inductor")
    with pytest.raises(UnsupportedError, match="memory of their own, but whole, upper overlap"):
        step(torch.randn(16, 8))


def test_parameters_side_by_side_in_one_memory_are_released():
    flat = torch.randn(128)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model[0].weight, model[2].weight = (nn.Parameter(flat[part].view(8, 8)) for part in (slice(64), slice(64, 128)))
    step = graphopt.compile(
        model, ["loss"], loss=lambda output, batch: output.square().mean(), optimizer=optim.SGD(lr=0.1), backend="aten"
    )
    step(torch.randn(4, 8))
    assert "release" in {str(row.action) for row in step.program.decisions.rows}


class Decoder(nn.Module):
    """Reads its batch last in the backward part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(8, 8), nn.Embedding(16, 8)

    def forward(self, x):
        return {"loss": (self.first(x).tanh() @ self.table.weight.t()).square().mean()}


def test_a_batch_in_the_memory_of_a_parameter_is_read_as_it_was():
    torch.manual_seed(0)
    model = Decoder()
    twin = copy.deepcopy(model)
    step = graphopt.compile(model, ["loss"], optimizer=optim.SGD(lr=0.5), backend="aten")
    eager = torch.optim.SGD(twin.parameters(), lr=0.5, foreach=False)
    for _ in range(3):
        step(model.table.weight.detach()[:5])
        eager.zero_grad()
        twin(twin.table.weight.detach()[:5])["loss"].backward()
        eager.step()
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, its)
