"""C08 (structured outputs) and the errors of outputs and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import graphopt
from graphopt.errors import OutputError


@dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    hidden: Any = None
    note: int = 0
    cache: Any = None


class Named(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor | None


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids, labels=None):
        h = self.embedding(ids)
        logits = self.head(h)
        loss = None if labels is None else nn.functional.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))
        if self.kind == "dataclass":
            return Result(logits, loss, (h, h * 2), 3, None)
        if self.kind == "named":
            return Named(logits, loss)
        if self.kind == "hf":
            return CausalLMOutput(loss=loss, logits=logits, hidden_states=(h, h * 2))
        if self.kind == "tuple":
            return loss, logits, {"hidden": (h, [h * 2, None, 5])}
        return {"logits": logits, "loss": loss, "note": 3, "hidden": (h, h * 2)}


def make(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Structured(kind), torch.randint(0, 9, (2, 5)), torch.randint(0, 7, (2, 5))


def value_of(result: Any, name: str) -> Any:
    return result[name] if isinstance(result, dict) else getattr(result, name)


@pytest.mark.parametrize("kind", ["dataclass", "named", "hf", "dict"])
def test_values_type_and_both_kinds_of_access(kind):
    model, ids, labels = make(kind)
    expected = model(ids, labels)
    out = graphopt.compile(model, outputs=["logits", "loss"])(labels=labels, ids=ids)
    assert isinstance(out, type(expected))
    for name in ("loss", "logits"):
        assert torch.equal(getattr(out, name), value_of(expected, name))
        assert torch.equal(out[name], value_of(expected, name))


def test_nested_hidden_states_keep_structure():
    model, ids, labels = make("dataclass")
    out = graphopt.compile(model, outputs=["hidden", "loss"])(ids, labels)
    assert isinstance(out.hidden, tuple) and len(out.hidden) == 2
    assert torch.equal(out.hidden[1], model.embedding(ids) * 2)
    assert out.note == 3 and out.cache is None and out.logits is None


def test_positions_name_outputs_of_tuples_and_nests():
    model, ids, labels = make("tuple")
    out = graphopt.compile(model, outputs=["2.hidden", "0"], loss="0")(ids, labels)
    assert torch.equal(out["0"], model(ids, labels)[0])
    nested = out["2"]["hidden"]
    assert torch.equal(nested[1][0], model.embedding(ids) * 2) and nested[1][1:] == [None, 5]


def test_missing_loss_says_so():
    model, ids, _ = make("dataclass")
    with pytest.raises(OutputError, match=r"'loss' is missing.*labels"):
        graphopt.compile(model, outputs=["logits", "loss"])(ids=ids, labels=None)


def test_misspelt_output_lists_what_there_is():
    model, ids, labels = make("dataclass")
    with pytest.raises(OutputError, match=r"'los'; did you mean 'loss'.*logits, loss, hidden.0, hidden.1"):
        graphopt.compile(model, outputs=["los"])(ids, labels)


def test_step_without_loss_names_what_there_is():
    model, ids, labels = make("dict")
    step = graphopt.compile(model, outputs=["logits"], optimizer=graphopt.optim.SGD(lr=0.1))
    with pytest.raises(OutputError, match=r"no loss called 'loss'.*logits, loss"):
        step(ids, labels)


def test_loss_must_be_a_scalar():
    model, ids, labels = make("dict")
    step = graphopt.compile(model, outputs=["logits"], loss="logits", optimizer=graphopt.optim.SGD(lr=0.1))
    with pytest.raises(OutputError, match=r"scalar; its shape is \[2, 5, 7\]"):
        step(ids, labels)


def test_loss_must_be_differentiable():
    model, ids, labels = make("dict")

    def accuracy(out, batch):
        return (out.logits.argmax(-1) == batch.labels).float().mean()

    step = graphopt.compile(model, loss=accuracy, outputs=["logits"], optimizer=graphopt.optim.SGD(lr=0.1))
    with pytest.raises(OutputError, match="not differentiable"):
        step(ids, labels)


def test_loss_must_reach_a_parameter():
    model, ids, labels = make("dict")
    step = graphopt.compile(
        model,
        loss=lambda out, batch: batch.labels.float().mean(),
        outputs=["logits"],
        optimizer=graphopt.optim.SGD(lr=0.1),
    )
    with pytest.raises(OutputError, match="reaches no trainable parameter"):
        step(ids, labels)
    model.requires_grad_(False)
    frozen = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    with pytest.raises(OutputError, match="0 of them trainable"):
        frozen(ids, labels)


def test_loss_function_may_use_batch_entries_the_model_does_not_take():
    model = nn.Linear(4, 3)
    step = graphopt.compile(
        model,
        outputs=["0"],
        loss=lambda out, batch: nn.functional.cross_entropy(out, batch["target"]),
        optimizer=graphopt.optim.SGD(lr=0.1),
    )
    x, target = torch.randn(5, 4), torch.randint(0, 3, (5,))
    expected = nn.functional.cross_entropy(model(x), target)
    assert torch.equal(step(input=x, target=target).loss, expected)


def test_string_for_outputs_is_refused():
    with pytest.raises(OutputError, match=r"outputs=\['loss'\]"):
        graphopt.compile(nn.Linear(2, 2), outputs="loss")


def test_names_shared_by_batch_parameters_and_outputs_stay_apart():
    class SameNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, scale, grad_norm):
            return {"loss": (self.scale * scale * grad_norm).sum(), "grad_norm": grad_norm * 2}

    model = SameNames()
    step = graphopt.compile(
        model, outputs=["loss", "grad_norm"], optimizer=graphopt.optim.SGD(lr=1.0), clip_grad_norm=100.0
    )
    out = step(scale=torch.tensor([3.0, 4.0]), grad_norm=torch.tensor([1.0, 1.0]))
    assert torch.equal(model.scale, torch.tensor([-2.0, -2.0]))
    assert torch.equal(out.grad_norm, torch.tensor([2.0, 2.0])) and step.last_update.grad_norm == 5.0
    module = graphopt.compile(model, outputs=["loss"])
    scale = torch.tensor([3.0, 4.0], requires_grad=True)
    module(scale, torch.ones(2)).loss.backward()
    assert torch.equal(scale.grad, model.scale) and torch.equal(model.scale.grad, scale)
