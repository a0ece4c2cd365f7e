"""What a batch may hold beside tensors, and what its tensors are called."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.batch import BatchBinder
from graphopt.errors import BatchError
from graphopt.execute.cache import batch_key

X = torch.ones(2, 3)


class Mode(enum.Enum):
    FAST = 1


class TakesAnything(nn.Module):
    def forward(self, x, other=None):
        return x


@dataclass
class Pair:
    left: torch.Tensor


def bind(other):
    return BatchBinder(TakesAnything(), allow_extra=False).bind((X,), {"other": other})


@pytest.mark.parametrize(
    "leaf",
    [
        *(None, True, 1, 0.5, 1j, "text", b"bytes", torch.float16, torch.device("cpu"), Mode.FAST, slice(1, None)),
        *((1, "a"), frozenset({1, 2}), {"past_key_values": None, "nested": [1, {"deep": 2.0}]}),
    ],
)
def test_simple_values_are_fixed(leaf):
    assert bind(leaf).names == ("x",)


@pytest.mark.parametrize("leaf", [np.ones(3), np.float32(1), object(), Pair(X), {1, 2}, frozenset({object()})])
def test_other_objects_are_refused_with_their_path(leaf):
    with pytest.raises(BatchError, match=r"pass tensors: found .* at 'other\.inner\.0'"):
        bind({"inner": [leaf]})


def test_dataclass_error_says_how_to_register():
    with pytest.raises(BatchError, match="register_dataclass"):
        bind(Pair(X))


@pytest.mark.parametrize(("other", "name"), [({1: X, "1": X}, "other.1"), ({"a": {"b": X}, "a.b": X}, "other.a.b")])
def test_two_tensors_of_one_name_are_refused(other, name):
    with pytest.raises(BatchError, match=f"several batch tensors are called '{name}'"):
        bind(other)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (frozenset({1}), frozenset({True})), (1, 1.0)])
def test_equal_values_that_differ_have_graphs_of_their_own(one, other):
    assert batch_key(bind(one)) != batch_key(bind(other))
    assert batch_key(bind(one)) == batch_key(bind(one))


def test_empty_tensors_share_no_memory():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, a, b):
            a.add_(1)
            return {"loss": self.w * (a.sum() + b.sum())}

    step = graphopt.compile(Writes(), outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    assert step(torch.empty(0), torch.empty(0)).loss == 0.0
