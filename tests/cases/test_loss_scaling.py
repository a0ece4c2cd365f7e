"""C22 and C23: an overflow changes nothing but the scale; clipping sees unscaled gradients of the whole window."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

from graphopt import Accumulate, LossScale, optim
from tests.support.scaling import Regression, compiled, everything, regression_batches, same

BOTH = pytest.mark.parametrize("decides", ["host", "device"])


@pytest.fixture(autouse=True)
def warnings_are_errors():
    """torch warns when a schedule moves before the optimizer has: it never may."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        yield


# ---- C22 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decides", "backend", "compute", "tolerance"),
    [
        ("host", "aten", torch.float32, 1e-5),
        ("device", "aten", torch.float32, 1e-5),
        ("host", "aten", torch.float16, 1e-2),
        ("device", "aten", torch.float16, 1e-2),
        ("host", "inductor", torch.float32, 1e-5),
        ("device", "inductor", torch.float32, 1e-5),
    ],
)
def test_an_overflow_skips_everything_and_the_schedule(decides, backend, compute, tolerance):
    model = Regression(compute)
    twin = copy.deepcopy(model)
    scaling = LossScale(growth_interval=2, decides=decides)
    step = compiled(model, optimizer=optim.AdamW(lr=0.1), loss_scale=scaling, backend=backend)
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda t: 1 / (t + 1))
    batches = regression_batches(bad=[1])
    scales, rates = [], []
    for position, batch in enumerate(batches):
        before = everything(step)
        step(**batch)
        assert (step.last_update.skipped is not None) == (position == 1)
        if position == 1:
            assert same(before, everything(step))
            assert step.state.skipped == 1
        schedule.step()
        scales.append(step.loss_scale)
        rates.append(step.optimizer.param_groups[0]["lr"])
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**16]
    assert rates == pytest.approx([0.1 / 2, 0.1 / 2, 0.1 / 3, 0.1 / 4, 0.1 / 5])
    assert schedule.last_epoch == 4 and step.state.updates == 4

    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    its_schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    for position in (0, 2, 3, 4):
        optimizer.zero_grad()
        twin(**batches[position])["loss"].backward()
        optimizer.step()
        its_schedule.step()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance)


class TwoPaths(nn.Module):
    """``poison`` reaches the gradient of ``second`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, poison):
        return {"loss": (self.first * x).sum() + (self.second * poison).sum()}


@BOTH
@pytest.mark.parametrize(("clip", "bad"), [(None, float("nan")), (1.0, float("nan")), (None, -float("inf"))])
def test_one_bad_gradient_skips_all_parameters(decides, clip, bad):
    step = compiled(
        TwoPaths(),
        optimizer=optim.AdamW(lr=0.1),
        clip_grad_norm=clip,
        loss_scale=LossScale(decides=decides),
    )
    step(x=torch.ones(3), poison=torch.ones(3))
    before = everything(step)
    step(x=torch.ones(3), poison=torch.tensor([1.0, bad, 1.0]))
    assert same(before, everything(step))
    assert "not finite" in step.last_update.skipped
    assert step.loss_scale == 2.0**15


@BOTH
def test_the_first_step_may_overflow(decides):
    scaling = LossScale(decides=decides)
    step = compiled(Regression(), optimizer=optim.AdamW(lr=0.1), loss_scale=scaling)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1, gamma=0.5)
    bad, good = regression_batches(2, bad=[0])
    before = everything(step)
    step(**bad)
    schedule.step()
    assert same(
        dict(step.model.named_parameters()), {name: before[name] for name in dict(step.model.named_parameters())}
    )
    assert all(not values.get("step", 0) for values in step.state_dict()["state"].values())
    assert schedule.last_epoch == 0 and step.optimizer.param_groups[0]["lr"] == 0.1
    step(**good)
    schedule.step()
    assert schedule.last_epoch == 1 and step.state.updates == 1


@BOTH
def test_overflows_all_along_stop_at_the_floor_and_warn(decides, caplog):
    scaling = LossScale(init=8.0, floor=2.0, warn_after=3, decides=decides)
    step = compiled(Regression(), optimizer=optim.SGD(lr=0.1), loss_scale=scaling)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1, gamma=0.5)
    (bad,) = regression_batches(1, bad=[0])
    before = everything(step)
    scales = []
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        for _ in range(6):
            step(**bad)
            schedule.step()
            scales.append(step.loss_scale)
    assert scales == [4.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert same(before, everything(step)) and schedule.last_epoch == 0
    assert (step.state.updates, step.state.skipped) == (0, 6)
    messages = [record.getMessage() for record in caplog.records]
    assert ["smallest loss scale" in message for message in messages] == [True, False]
    assert "6 updates in a row" in messages[1]


@BOTH
def test_updates_skipped_in_a_row_are_warned_about_every_so_often(decides, caplog):
    scaling = LossScale(warn_after=2, decides=decides)
    step = compiled(Regression(), optimizer=optim.SGD(lr=0.1), loss_scale=scaling)
    bad, good = regression_batches(2, bad=[0])
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        for batch in (bad, good, bad, bad, bad, bad):
            step(**batch)
            assert step.loss_scale is not None
        assert step.last_update.skipped
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" updates")[0].split()[-1] for message in messages] == ["2", "4"]


@BOTH
def test_the_scale_grows_exactly_at_the_interval(decides):
    scaling = LossScale(init=4.0, growth=8.0, growth_interval=3, decides=decides)
    step = compiled(Regression(), optimizer=optim.SGD(lr=0.01), loss_scale=scaling)
    scales = []
    for batch in regression_batches(9, bad=[4]):
        step(**batch)
        step.last_update  # noqa: B018 - the scale of a device is that of the last update it knows
        scales.append(step.loss_scale)
    #                 three good      one good, bad     three good        one more
    assert scales == [4.0, 4.0, 32.0, 32.0, 16.0, 16.0, 16.0, 128.0, 128.0]


@BOTH
def test_a_static_scale_never_changes_but_still_skips(decides):
    scaling = LossScale.static(1024.0, decides=decides)
    step = compiled(Regression(), optimizer=optim.SGD(lr=0.1), loss_scale=scaling)
    before = everything(step)
    for batch in regression_batches(3, bad=[0, 1, 2]):
        step(**batch)
        assert step.last_update.skipped and step.loss_scale == 1024.0
    assert same(before, everything(step))


# ---- C23 ---------------------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    """``scale * w[i]``: the gradient of w is ``scale`` at i."""

    def __init__(self, size=2, dtype=torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient):
        return {"loss": (self.w * gradient).sum()}


def two_micro_batches(decides, *, clip=1.0, gradients=((3.0, 0.0), (0.0, 4.0)), dtype=torch.float32):
    model = Chosen(dtype=dtype)
    step = compiled(
        model,
        optimizer=optim.SGD(lr=1.0),
        clip_grad_norm=clip,
        accumulate=Accumulate(2, reduction="sum"),
        loss_scale=LossScale.static(1024.0, decides=decides),
    )
    for gradient in gradients:
        step(gradient=torch.tensor(gradient, dtype=dtype))
    return model, step


@BOTH
def test_clipping_sees_the_unscaled_gradients_of_the_whole_window(decides):
    model, step = two_micro_batches(decides)
    torch.testing.assert_close(-model.w.detach(), torch.tensor([0.6, 0.8]), rtol=0, atol=1e-6)
    assert step.last_update.grad_norm == 5.0


@BOTH
def test_a_norm_below_the_limit_changes_nothing(decides):
    model, step = two_micro_batches(decides, gradients=((0.25, 0.0), (0.0, 0.5)))
    assert model.w.tolist() == [-0.25, -0.5]
    assert step.last_update.grad_norm == pytest.approx(0.3125**0.5)


@BOTH
@pytest.mark.parametrize(("position", "bad", "clip"), [(0, float("inf"), 1.0), (1, float("nan"), None)])
def test_an_overflow_anywhere_drops_the_whole_window(decides, bad, clip, position):
    gradients = [(3.0, 0.0), (0.0, 4.0)]
    gradients[position] = (bad, 0.0)
    model, step = two_micro_batches(decides, clip=clip, gradients=gradients)
    assert model.w.tolist() == [0.0, 0.0]
    assert "not finite" in step.last_update.skipped and step.last_update.micro_batches == 2
    for gradient in ((3.0, 0.0), (0.0, 4.0)):
        step(gradient=torch.tensor(gradient))
    assert step.last_update.skipped is None
    assert model.w.tolist() == pytest.approx([-0.6, -0.8] if clip else [-3.0, -4.0])


@BOTH
@pytest.mark.parametrize("clip", [None, 2.0])
def test_finite_gradients_whose_squares_overflow_are_no_overflow(decides, clip):
    """4e25 squared is no float32, and 300 squared no float16; neither are gradients that overflow."""
    huge = Chosen()
    step = compiled(
        huge,
        optimizer=optim.SGD(lr=1.0),
        clip_grad_norm=clip,
        loss_scale=LossScale(init=1024.0, decides=decides),
    )
    step(gradient=torch.tensor([3e25, 4e25]))
    assert step.last_update.skipped is None and step.loss_scale == 1024.0
    if clip is None:
        assert huge.w.tolist() == pytest.approx([-3e25, -4e25])
        return
    # The norm is replaced by a bound, so the update has the right direction and at most the length.
    length = huge.w.detach().norm().item()
    assert clip / 2**0.5 < length < clip
    torch.testing.assert_close(huge.w.detach() / -length, torch.tensor([0.6, 0.8]))
    assert 5e25 < step.last_update.grad_norm < 5e25 * 2**0.5

    narrow, step = two_micro_batches(decides, clip=clip, dtype=torch.float16, gradients=((60.0, 0.0), (0.0, 1.0)))
    assert step.last_update.grad_norm == pytest.approx(3601**0.5)
    narrow = Chosen(dtype=torch.float16)
    step = compiled(
        narrow,
        optimizer=optim.SGD(lr=1.0),
        clip_grad_norm=clip,
        loss_scale=LossScale.static(64.0, decides=decides),
    )
    step(gradient=torch.tensor([300.0, 400.0], dtype=torch.float16))
    assert step.last_update.grad_norm == 500.0
    assert narrow.w.tolist() == pytest.approx([-0.6 * clip, -0.8 * clip], rel=2**-10)


# ---- with other parts of the update ----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_leaves_codes_and_masters_as_they_were(decides, clip):
    """State of 8 bits, whose operators skip by themselves where the factor is NaN, and float32 masters of float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 2)).half()
    step = compiled(
        model,
        loss=lambda output, batch: output.float().square().mean(),
        optimizer=optim.AdamW8bit(lr=1e-3),
        precision="fp16",
        clip_grad_norm=clip,
        loss_scale=LossScale(init=2.0**10, decides=decides),
    )
    x = torch.randn(4, 64).half()
    step(x)
    assert step.last_update.skipped is None
    before = everything(step)
    assert any(value.dtype == torch.uint8 for value in before.values() if isinstance(value, torch.Tensor))
    step(torch.full_like(x, float("inf")))
    assert step.last_update.skipped and step.loss_scale == 2.0**9
    assert same(before, everything(step))
    step(x)
    assert step.last_update.skipped is None and not same(before, everything(step))


def test_computing_in_float16_scales_by_default():
    step = compiled(Regression(), optimizer=optim.SGD(lr=0.1), precision="fp16")
    assert step.loss_scale == 2.0**16
    step(**regression_batches(1)[0])
    assert step.last_update.loss_scale == 2.0**16
