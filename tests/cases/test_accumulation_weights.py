"""The window equals the full batch, or the log says that it may not."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Accumulate, optim
from graphopt.errors import OutputError, StateError, UnsupportedError

MASK = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1])
LABELS = torch.tensor([0, 1, -100, 2, 3, 4, -100, -100, -100, 0, 1, 2])
SIZES = (5, 5, 2)  # two sizes: each is compiled

PROVEN = {
    "mean": lambda o, b: o.square().mean(),
    "half_mean": lambda o, b: o.square().mean() * torch.tensor(0.5),
    "one_minus_mean": lambda o, b: 1 - o.sigmoid().mean(),
    "mean_of_batch_means": lambda o, b: o.square().mean(0).mean(),
    "sum_of_batch_means": lambda o, b: o.square().mean(0).sum(),
    "mean_of_sums": lambda o, b: o.square().sum(1).mean(),
    "sum": lambda o, b: o.square().sum(),
    "sum_over_2_over_b": lambda o, b: o.square().sum() / 2 / len(b["y"]),
    "sum_over_b_times_c": lambda o, b: o.square().sum() / len(b["y"]) * 0.3,
    "two_sums_over_b": lambda o, b: (0.3 * o.square().sum() + 0.7 * o.sum()) / len(b["y"]),
    "two_means": lambda o, b: o.square().mean() + 0.1 * o.mean(),
    "divided_inside_sum": lambda o, b: (o.square() / len(b["y"])).sum(),
    "masked_inside_sum": lambda o, b: (o.square().sum(1) * b["m"] / b["m"].sum()).sum(),
    "normalised_mask": lambda o, b: (o.square().sum(1) * b["m"]).sum() / b["m"].sum().clamp(min=1),
    "masked": lambda o, b: (o.square().sum(1) * b["m"]).sum() / (b["m"].sum() * 5),
    "cross_entropy": lambda o, b: F.cross_entropy(o, b["y"]),
    "smoothed": lambda o, b: F.cross_entropy(o, b["y"], label_smoothing=0.1),
    "smoothed_other_index": lambda o, b: F.cross_entropy(o, b["y"].clamp(min=0), label_smoothing=0.1, ignore_index=0),
    "soft_labels": lambda o, b: F.cross_entropy(o, b["p"]),
    "kl": lambda o, b: F.kl_div(o.log_softmax(-1), b["p"], reduction="batchmean"),
}
UNPROVEN = {
    "aux": lambda o, b: F.cross_entropy(o, b["y"]) + 1e-2 * o.square().mean(),
    "scaled_sum": lambda o, b: 0.3 * o.square().sum(),
    "sum_over_mean_mask": lambda o, b: o.sum() / b["m"].mean(),
    "sum_over_root": lambda o, b: o.sum() / b["m"].sum().sqrt(),
    "reciprocal_inside": lambda o, b: (o * (1 / b["m"].sum())).sum(),
    "transposed_means": lambda o, b: o.T.mean(1).sum(),
}


def batches():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator)
    p = torch.randn(12, 5, generator=generator).softmax(-1)
    full = {"y": LABELS, "m": MASK, "p": p}
    parts = zip(x.split(SIZES), *(value.split(SIZES) for value in full.values()), strict=True)
    return x, full, [(part[0], dict(zip(full, part[1:], strict=True))) for part in parts]


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", PROVEN)
def test_window_of_uneven_parts_equals_full_batch(name, caplog):
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    twin = copy.deepcopy(model)
    x, full, parts = batches()
    expected = PROVEN[name](twin(x), full)
    expected.backward()
    step = graphopt.compile(model, outputs=["loss"], loss=PROVEN[name], optimizer=optim.SGD(lr=1.0), accumulate=3)
    for part, others in parts:
        step(part, **others)
    for parameter, reference in zip(model.parameters(), twin.parameters(), strict=True):
        # float32 sums of up to 12 x 5 values of order 1 to 10
        assert torch.allclose(reference - parameter, reference.grad, rtol=1e-5, atol=2e-6)
    assert step.last_update.loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven_weight_is_said_once(name, caplog):
    _, _, parts = batches()
    step = graphopt.compile(
        nn.Linear(3, 5), outputs=["loss"], loss=UNPROVEN[name], optimizer=optim.SGD(lr=1e-3), accumulate=3
    )
    for part, others in parts:
        step(part, **others)
    (record,) = warnings_of(caplog)
    assert "Accumulate(reduction=" in record.getMessage()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_warning_where_the_user_settled_it(reduction, caplog):
    _, _, parts = batches()
    step = graphopt.compile(
        nn.Linear(3, 5),
        outputs=["loss"],
        loss=UNPROVEN["aux"],
        optimizer=optim.SGD(lr=1e-3),
        accumulate=Accumulate(3, reduction=reduction),
    )
    step(parts[0][0], **parts[0][1])
    assert not warnings_of(caplog)


def test_micro_batch_without_items_adds_nothing_instead_of_nan():
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    twin = copy.deepcopy(model)

    def loss(o, b):
        return (o.square().sum(1) * b["m"]).sum() / b["m"].sum()

    x, mask = torch.randn(6, 3), torch.tensor([1.0, 0, 1, 0, 0, 0])
    loss(twin(x), {"m": mask}).backward()
    step = graphopt.compile(model, outputs=["loss"], loss=loss, optimizer=optim.SGD(lr=1.0), accumulate=2)
    for x_part, mask_part in zip(x.chunk(2), mask.chunk(2), strict=True):
        step(x_part, m=mask_part)
    for parameter, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(reference - parameter, reference.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_output", [False, True])
def test_weight_beyond_float16_does_not_overflow(is_output):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float16))

        def forward(self, x):
            return {"loss": (self.w * x).mean(), "count": torch.full((), 100_000.0)}

    model = Scaled()
    accumulate = Accumulate(2, weight="count") if is_output else 2
    step = graphopt.compile(model, outputs=["loss", "count"], optimizer=optim.SGD(lr=0.5), accumulate=accumulate)
    for _ in range(2):
        step(torch.ones(100_000, dtype=torch.float16))
    # each element's gradient is 1e-5 in float16, whose step there is 6e-8
    assert model.w.item() == pytest.approx(0.5, abs=0.5 * 6e-8 / 1e-5)


class Weighted(nn.Module):
    def __init__(self, shape) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.shape = shape

    def forward(self, x, n):
        return {"loss": self.linear(x).mean(), "n": n.expand(self.shape)}


def test_weight_output_of_one_element_counts_as_a_number():
    model = Weighted((1,))
    before = model.linear.weight.detach().clone()
    step = graphopt.compile(
        model, outputs=["loss", "n"], optimizer=optim.SGD(lr=1.0), accumulate=Accumulate(2, weight="n")
    )
    step(torch.ones(2, 3), n=torch.tensor([3.0]))
    step(torch.full((2, 3), 5.0), n=torch.tensor([1.0]))
    assert torch.allclose(before - model.linear.weight, torch.full((1, 3), 2.0), rtol=0, atol=1e-6)
    assert step.state.window.weight.shape == ()


def test_weight_output_of_several_elements_is_refused():
    step = graphopt.compile(
        Weighted((2,)), outputs=["loss", "n"], optimizer=optim.SGD(lr=1.0), accumulate=Accumulate(2, weight="n")
    )
    with pytest.raises(OutputError, match="one number"):
        step(torch.ones(2, 3), n=torch.tensor([3.0]))


def test_state_of_another_dtype_is_refused_before_anything_runs():
    model = nn.Linear(3, 5)
    step = graphopt.compile(model, outputs=["loss"], loss=PROVEN["mean"], optimizer=optim.AdamW(lr=0.1))
    step(torch.ones(2, 3))
    model.double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateError, match=r"state exp_avg of '\w+' is f32.*now needs f64"):
        step(torch.ones(2, 3, dtype=torch.float64))
    assert step.broken is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.AdamW])
def test_complex_parameter_under_adam_is_refused(optimizer):
    model = nn.Linear(3, 5, dtype=torch.complex64)
    step = graphopt.compile(
        model, outputs=["loss"], loss=lambda o, b: o.abs().square().mean(), optimizer=optimizer(lr=0.1)
    )
    with pytest.raises(UnsupportedError, match=r"'weight' is complex|'bias' is complex"):
        step(torch.ones(2, 3, dtype=torch.complex64))
