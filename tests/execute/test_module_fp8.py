"""Delayed scaling of a compiled module without an optimizer: what it remembers and when."""

from __future__ import annotations

import copy

import pytest
import torch

import graphopt
from graphopt.errors import StateError
from tests.support.fp8_state import RECIPES, Blocks, batches, spoiled


@pytest.fixture
def module():
    return graphopt.compile(Blocks(), outputs=["loss"], precision=RECIPES["delayed"], backend="aten")


def rows_of(module):
    saved = module.fp8_state_dict()["history"]
    return dict(zip(saved["names"], saved["values"].tolist(), strict=True))


def largest(batch):
    return batch["x"].to(torch.bfloat16).abs().max().item()


def gradients(module):
    found = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    return found


def test_forward_and_backward_move_their_rows_once_each(module):
    first, second = batches(2)
    early = module(**first).loss
    assert rows_of(module)["layers.0.input"][:2] == [largest(first), 0.0]
    assert not any(rows_of(module)["layers.0.gradient"])
    late = module(**second).loss
    late.backward(retain_graph=True)
    early.backward()
    rows = rows_of(module)
    assert rows["layers.0.input"][:3] == [largest(second), largest(first), 0.0]
    assert [bool(value) for value in rows["layers.0.gradient"]] == [True, True, False, False]


def test_evaluation_moves_nothing(module):
    module(**batches(1)[0]).loss.backward()
    before = rows_of(module)
    module.eval()
    with torch.no_grad():
        module(**batches(1)[0])
    module.train()
    assert rows_of(module) == before


def test_what_is_not_finite_shows_in_the_gradients_and_enters_no_history(module):
    (batch,) = batches(1)
    module(**batch).loss.backward()
    gradients(module)
    before = rows_of(module)
    module(**spoiled(batch, float("inf"))).loss.backward()
    assert all(not torch.isfinite(gradient).all() for gradient in gradients(module)[:1])
    assert rows_of(module) == before


def test_a_module_goes_on_from_a_saved_history(module):
    for batch in batches(3):
        module(**batch).loss.backward()
    module.zero_grad()
    saved, model = copy.deepcopy(module.fp8_state_dict()), copy.deepcopy(module.state_dict())
    module(**batches(4)[3]).loss.backward()
    expected = gradients(module)
    module.load_fp8_state_dict(saved)
    module.load_state_dict(model)
    module(**batches(4)[3]).loss.backward()
    assert all(torch.equal(left, right) for left, right in zip(gradients(module), expected, strict=True))
    with pytest.raises(StateError, match="expected the history"):
        module.load_fp8_state_dict({})
