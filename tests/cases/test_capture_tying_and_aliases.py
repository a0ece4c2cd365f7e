"""C01 (tied weights) and C03 (inputs that are views, overlap or change in place)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.errors import BatchError


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        logits = self.lm_head(self.embedding(ids))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def test_tied_weight_trains_as_one_tensor():
    torch.manual_seed(0)
    model = TiedLanguageModel()
    twin = copy.deepcopy(model)
    ids = torch.randint(0, 11, (2, 5))
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.AdamW(lr=1e-2))
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(3):
        step(ids=ids)
        reference.zero_grad()
        twin(ids)["loss"].backward()
        reference.step()
        assert torch.equal(model.embedding.weight, twin.embedding.weight)
    assert model.lm_head.weight is model.embedding.weight
    assert len(step.optimizer.state) == len(reference.state) == 1
    assert sum(len(group["params"]) for group in step.optimizer.param_groups) == 1


def test_tied_gradient_counts_both_paths():
    class TwoNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight1 = nn.Parameter(torch.randn(4, 4))
            self.weight2 = self.weight1

        def forward(self, x):
            return {"loss": (self.weight1 @ x + self.weight2 @ x).sum()}

    model = TwoNames()
    compiled = graphopt.compile(model, outputs=["loss"])
    compiled(torch.ones(4)).loss.backward()
    assert torch.equal(model.weight1.grad, torch.full((4, 4), 2.0))


def test_write_through_a_view_reaches_the_batch_tensor():
    def add_to_even(base):
        base[0::2].add_(1)
        return base.sum()

    base = torch.ones(6)
    graphopt.compile(add_to_even)(base)
    assert torch.equal(base, torch.tensor([2.0, 1, 2, 1, 2, 1]))


def test_overlapping_inputs_of_a_writing_model_are_refused_by_name():
    def double_first(x, y):
        x.mul_(2)
        return x + y

    compiled = graphopt.compile(double_first)
    assert torch.equal(compiled(torch.ones(4), torch.ones(4))["0"], torch.full((4,), 3.0))
    base = torch.ones(8)
    with pytest.raises(BatchError, match="'x' and 'y' share memory"):
        compiled(base[:4], base[2:6])
    assert torch.equal(base, torch.ones(8))


def test_write_after_detach_keeps_eager_gradient():
    def detach_then_write(inp):
        g = inp * 2
        t = g.detach()
        g.mul_(2)
        return g, t

    inp = torch.ones(3, requires_grad=True)
    g, t = graphopt.compile(detach_then_write)(inp).values()
    g.sum().backward()
    assert torch.equal(inp.grad, torch.full((3,), 4.0))
    assert torch.equal(t, torch.full((3,), 4.0))
