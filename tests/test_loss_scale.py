"""What ``loss_scale=`` means, and what a LossScale refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphopt
from graphopt import LossScale, optim
from graphopt.errors import UnsupportedError
from graphopt.loss_scale import loss_scale_of


@pytest.mark.parametrize(
    ("value", "precision", "expected"),
    [
        ("auto", "fp32", None),
        ("auto", "fp16", LossScale()),
        ("auto", SimpleNamespace(compute="fp16"), LossScale()),
        ("auto", SimpleNamespace(compute="bf16"), None),
        (None, "fp16", None),
        ("dynamic", "fp32", LossScale()),
        (1024, "fp32", LossScale(init=1024.0, dynamic=False)),
        (LossScale(init=8.0), "fp16", LossScale(init=8.0)),
    ],
)
def test_the_option_is_a_name_a_number_or_a_value(value, precision, expected):
    assert loss_scale_of(value, precision=precision) == expected


@pytest.mark.parametrize("value", ["static", True, object()])
def test_other_values_of_the_option_are_refused(value):
    with pytest.raises(UnsupportedError, match="loss_scale expects"):
        loss_scale_of(value, precision="fp32")


@pytest.mark.parametrize(
    "options",
    [
        {"init": 0.0},
        {"init": float("inf")},
        {"init": float("nan")},
        {"growth": 1.0},
        {"backoff": 1.0},
        {"backoff": 0.0},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"floor": 0.0},
        {"floor": 2.0**17},
        {"warn_after": 0},
        {"decides": "gpu"},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        LossScale(**options)


def test_a_static_scale_may_be_below_one():
    assert LossScale.static(0.5).init == 0.5


def test_a_module_without_optimizer_refuses_a_scale():
    with pytest.raises(UnsupportedError, match="needs optimizer"):
        graphopt.compile(nn.Linear(2, 1), loss_scale="dynamic")


def test_without_a_scale_nothing_is_added():
    step = graphopt.compile(
        nn.Linear(2, 1), loss=lambda output, batch: output.sum(), outputs=["loss"], optimizer=optim.SGD(lr=0.1)
    )
    step(torch.ones(1, 2))
    assert step.loss_scale is None and step.last_update.loss_scale is None
    assert "loss_scale" not in step.source
