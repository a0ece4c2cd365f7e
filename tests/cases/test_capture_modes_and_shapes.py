"""C04 (train/eval), C05 (sizes frozen into the graph), C07 (weights replaced after compile)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import BatchError


def make_normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))


def test_mode_switch_is_honoured():
    model = make_normalised()
    compiled = graphopt.compile(model)
    x = torch.randn(6, 8)
    compiled(x)
    assert model[2].num_batches_tracked == 1
    model.eval()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    first, second = compiled(x)["0"], compiled(x)["0"]
    assert torch.equal(first, second)
    assert torch.equal(first, model(x))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    model.train()
    torch.manual_seed(1)
    one = compiled(x)["0"]
    torch.manual_seed(2)
    two = compiled(x)["0"]
    assert not torch.equal(one, two)
    assert model[2].num_batches_tracked == 3


def test_mode_of_a_submodule_is_honoured():
    model = make_normalised()
    twin = copy.deepcopy(model)
    compiled = graphopt.compile(model)
    x = torch.randn(6, 8)
    torch.manual_seed(2)
    compiled(x)
    torch.manual_seed(2)
    twin(x)
    model[2].eval()
    twin[2].eval()
    torch.manual_seed(3)
    expected = twin(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x)["0"], expected)
    assert model[2].num_batches_tracked == 1


def test_step_eval_runs_in_eval_mode_and_changes_nothing():
    model = make_normalised()
    step = graphopt.compile(
        model, outputs=["0"], loss=lambda out, batch: out.square().mean(), optimizer=graphopt.optim.SGD(lr=0.1)
    )
    x = torch.randn(6, 8)
    step(x)
    before = copy.deepcopy(model.state_dict())
    first, second = step.eval(x), step.eval(x)
    assert torch.equal(first["0"], second["0"])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(first["0"], copy.deepcopy(model).eval()(x))


class TinyCausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.positions = nn.Embedding(6, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 17)

    def forward(self, ids):
        length = ids.shape[1]
        h = self.embedding(ids) + self.positions(torch.arange(length))
        q, k, v = self.qkv(h).chunk(3, -1)
        mask = torch.tril(torch.ones(length, length)).bool()
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~mask, float("-inf"))
        logits = self.head(scores.softmax(-1) @ v)
        per_token = nn.functional.cross_entropy(logits.reshape(-1, 17), ids.reshape(-1), reduction="none")
        return {"loss": per_token.sum() / ids.shape[0], "logits": logits}


def test_every_shape_gives_eager_values():
    torch.manual_seed(0)
    model = TinyCausalModel()
    twin = copy.deepcopy(model)
    compiled = graphopt.compile(model, outputs=["loss"])
    losses = []
    for shape in [(4, 6), (3, 6), (4, 5), (1, 1), (4, 6)]:
        ids = torch.arange(shape[0] * shape[1]).reshape(shape) % 17
        model.zero_grad()
        twin.zero_grad()
        loss = compiled(ids=ids).loss
        loss.backward()
        expected = twin(ids)["loss"]
        expected.backward()
        losses.append(loss.detach())
        assert torch.equal(loss, expected)
        for (name, parameter), reference in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(parameter.grad, reference.grad, rtol=0, atol=1e-6), name
    assert torch.equal(losses[0], losses[-1])


def test_unsupported_shape_raises_before_anything_changes():
    model = TinyCausalModel()
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    step(ids=torch.zeros(2, 6, dtype=torch.long))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((graphopt.errors.GraphoptError, IndexError)):
        step(ids=torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(BatchError, match="accepts"):
        step(idx=torch.zeros(2, 6, dtype=torch.long))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_replaced_weights_are_followed():
    model = nn.Linear(5, 5)
    keys = list(model.state_dict())
    compiled = graphopt.compile(model)
    x = torch.ones(1, 5)
    compiled(x)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, assign=True)
    assert torch.equal(compiled(x)["0"], torch.zeros(1, 5))
    model.weight.data.fill_(2)
    assert torch.equal(compiled(x)["0"], torch.full((1, 5), 10.0))
    model.weight = nn.Parameter(torch.ones(5, 5))
    assert torch.equal(compiled(x)["0"], torch.full((1, 5), 5.0))
    assert list(model.state_dict()) == keys == list(compiled.state_dict())


def test_step_follows_replaced_weights_and_keeps_keys():
    model = nn.Linear(5, 5)
    facts = [(name, value.dtype, value.shape) for name, value in model.state_dict().items()]
    step = graphopt.compile(
        model,
        outputs=["0"],
        loss=lambda out, batch: out.sum(),
        optimizer=graphopt.optim.AdamW(lr=0.1, weight_decay=0.0),
    )
    x = torch.ones(1, 5)
    step(x)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, assign=True)
    step(x)
    assert torch.allclose(model.weight, torch.full((5, 5), -0.1))
    step(x)
    assert [(name, value.dtype, value.shape) for name, value in model.state_dict().items()] == facts
