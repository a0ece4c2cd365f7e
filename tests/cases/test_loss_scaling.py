"""C22, C23, C21(b), C57, C15 under loss scaling: an overflow changes nothing but the scale, all else is as without."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Accumulate, LossScale, optim
from graphopt.errors import StateError, UnsupportedError
from tests.support.saving import comparable, same_tree
from tests.support.steps import TwoLayers

BOTH = pytest.mark.parametrize("decides", ["host", "device"])


@pytest.fixture(autouse=True)
def warnings_are_errors():
    """torch warns when a schedule moves before the optimizer has: it never may."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        yield


def compiled(model, *, outputs=("loss",), backend="aten", **options):
    return graphopt.compile(model, outputs=list(outputs), backend=backend, **options)


class Regression(nn.Module):
    """Linear(2, 1) with a mean square loss, computed in ``compute``."""

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.compute = compute

    def forward(self, x, y):
        weight, bias = self.linear.weight.to(self.compute), self.linear.bias.to(self.compute)
        # Small, so that 65536 times its gradient is still a float16.
        return {"loss": (nn.functional.linear(x.to(self.compute), weight, bias).float() - y).square().mean() / 64}


def regression_batches(count=5, *, bad=()):
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 2, generator=generator), "y": torch.randn(4, 1)} for _ in range(count)]
    for position in bad:
        batches[position]["x"][0, 0] = float("inf")
    return batches


def everything(step):
    """Parameters and optimizer state, copied."""
    state = {
        f"{name}.{key}": value for name, values in step.state_dict()["state"].items() for key, value in values.items()
    }
    return copy.deepcopy({**dict(step.model.named_parameters()), **state})


def same(first, second):
    return same_tree(plain(first), plain(second))


def plain(values):
    return comparable(
        {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    )


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


# ---- the same numbers as without -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decides", "make", "accumulate", "clip"),
    [
        ("host", lambda: optim.SGD(lr=0.1, momentum=0.9), 1, None),
        ("device", lambda: optim.SGD(lr=0.1, momentum=0.9), 3, 0.1),
        ("host", optim.Adam, 1, 0.1),
        ("device", optim.Adam, 1, None),
        ("host", optim.AdamW, 3, None),
        ("host", optim.AdamW, 3, 0.1),
        ("device", optim.AdamW, 1, 0.1),
    ],
)
def test_a_power_of_two_changes_no_bit_in_float32(decides, make, accumulate, clip):
    torch.manual_seed(0)
    model = TwoLayers()
    twin = copy.deepcopy(model)
    options = {"accumulate": accumulate, "clip_grad_norm": clip}
    scaling = LossScale(init=2.0**10, growth_interval=2, decides=decides)
    scaled = compiled(model, optimizer=make(), loss_scale=scaling, **options)
    unscaled = compiled(twin, optimizer=make(), **options)
    for _ in range(6):
        batch = {"x": torch.randn(5, 16), "target": torch.randn(5, 4)}
        assert torch.equal(scaled(**batch).loss, unscaled(**batch).loss)
    assert scaled.last_update.loss == unscaled.last_update.loss
    assert scaled.last_update.grad_norm == unscaled.last_update.grad_norm
    assert same(everything(scaled), everything(unscaled))


@pytest.mark.parametrize(
    ("decides", "policy"), [("host", graphopt.checkpoint.EveryN(1)), ("device", None)], ids=["host", "device"]
)
def test_it_works_with_policies_and_both_backends(decides, policy):
    found = []
    for backend in ("aten", "inductor"):
        torch.manual_seed(0)
        step = compiled(
            TwoLayers(),
            optimizer=optim.AdamW(),
            clip_grad_norm=0.5,
            checkpoint=policy,
            backend=backend,
            loss_scale=LossScale(decides=decides),
        )
        for _ in range(3):
            step(x=torch.randn(5, 16), target=torch.randn(5, 4))
        assert step.last_update.skipped is None
        found.append(everything(step))
    for key, value in found[0].items():
        # Regions fuse and so round differently; Adam's first steps move by lr = 1e-3 whatever the gradient.
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-5, msg=key)


@BOTH
def test_buffers_keep_their_values_on_an_overflow(decides):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    step = compiled(
        model,
        loss=lambda output, batch: output.square().mean(),
        optimizer=optim.SGD(lr=0.1),
        loss_scale=LossScale(decides=decides),
    )
    step(torch.randn(8, 4))
    before = copy.deepcopy(dict(model.named_buffers()))
    step(torch.full((8, 4), float("inf")))
    assert step.last_update.skipped
    assert same(before, dict(model.named_buffers()))
    step(torch.randn(8, 4))
    assert model[1].num_batches_tracked.item() == 2


# ---- half precision ----------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A linear layer with two small factors beside it (C21)."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return {"loss": (self.base(x) + self.up(self.down(x))).square().mean()}


@pytest.mark.parametrize(
    ("decides", "dtype", "clip"),
    [
        ("host", torch.float16, None),
        ("host", torch.float16, 1.0),
        ("device", torch.float16, 1.0),
        ("device", torch.bfloat16, None),
    ],
)
def test_a_model_in_half_precision_trains(decides, dtype, clip):
    torch.manual_seed(0)
    model = LowRank().to(dtype)
    step = compiled(
        model,
        optimizer=optim.SGD(lr=0.1),
        clip_grad_norm=clip,
        loss_scale=LossScale(init=2.0**13, decides=decides),
    )
    x = torch.randn(8, 4).to(dtype)
    losses = [float(step(x=x).loss) for _ in range(6)]
    assert step.state_dict()["counters"] == {"updates": 6, "skipped": 0}
    assert losses[-1] < 0.8 * losses[0]


@BOTH
def test_a_scale_that_a_float16_loss_cannot_hold_comes_down(decides):
    torch.manual_seed(0)
    model = LowRank().half()
    step = compiled(model, optimizer=optim.SGD(lr=0.1), loss_scale=LossScale(decides=decides))
    skipped = []
    for _ in range(3):
        step(x=torch.randn(8, 4).half())
        skipped.append(step.last_update.skipped is not None)
    assert skipped[0] and not skipped[-1]


def test_a_static_scale_that_a_float16_loss_cannot_hold_is_refused():
    model = LowRank().half()
    step = compiled(model, optimizer=optim.SGD(lr=0.1), loss_scale=2.0**16)
    with pytest.raises(UnsupportedError, match="at most 65504"):
        step(x=torch.randn(8, 4).half())


@BOTH
def test_gradients_below_float16_survive_by_the_scale(decides):
    """A gradient of 2e-8 is 0 in float16."""
    found = {}
    for name, scaling in (("scaled", LossScale(decides=decides)), ("plain", None)):
        model = Regression(torch.float16)
        before = model.linear.weight.detach().clone()
        step = compiled(
            model,
            loss=lambda output, batch: output["loss"] * 1e-9,
            optimizer=optim.SGD(lr=64e9),
            loss_scale=scaling,
        )
        step(**regression_batches(1)[0])
        found[name] = (model.linear.weight.detach() - before).abs().max().item()
    assert found["plain"] < 0.1 * found["scaled"]
    assert found["scaled"] > 0.1


# ---- C57, C15 ----------------------------------------------------------------------------------------------------


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids, labels):
        return {"loss": nn.functional.cross_entropy(self.head(self.embedding(ids)), labels)}


def labelled(valid):
    ids = torch.arange(6) % 11
    labels = torch.full((6,), -100)
    labels[:valid] = (ids[:valid] + 1) % 11
    return {"ids": ids, "labels": labels}


def labelled_step(decides, **options):
    scaling = LossScale(init=2.0**12, decides=decides)
    optimizer = optim.AdamW(lr=0.1, weight_decay=0.1)
    return compiled(
        Labelled(),
        optimizer=optimizer,
        accumulate=4,
        clip_grad_norm=1.0,
        loss_scale=scaling,
        **options,
    )


@BOTH
def test_a_window_without_labels_is_no_overflow(decides):
    step = labelled_step(decides)
    before = everything(step)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1, gamma=0.5)
    for _ in range(4):
        assert step(**labelled(0)).loss == 0.0
    schedule.step()
    assert "no item" in step.last_update.skipped and step.last_update.loss == 0.0
    assert step.loss_scale == 2.0**12 and schedule.last_epoch == 0
    after = everything(step)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(not values.get("step", 0) for values in step.state_dict()["state"].values())


@BOTH
def test_micro_batches_without_labels_count_nothing_under_a_scale(decides):
    step, whole = labelled_step(decides), Labelled()
    unscaled = compiled(whole, optimizer=optim.AdamW(lr=0.1, weight_decay=0.1), accumulate=4, clip_grad_norm=1.0)
    for valid in (5, 0, 3, 0):
        step(**labelled(valid))
        unscaled(**labelled(valid))
    assert step.last_update.skipped is None and step.last_update.weight == 8.0
    assert same(everything(step), everything(unscaled))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, gradient, weight):
        return {"loss": (self.w * gradient).sum() / weight, "weight": weight}


@BOTH
def test_an_overflow_in_a_micro_batch_of_no_weight_is_none(decides):
    model = Weighted()
    step = compiled(
        model,
        outputs=["loss", "weight"],
        optimizer=optim.SGD(lr=1.0),
        accumulate=Accumulate(2, weight="weight"),
        loss_scale=LossScale(decides=decides),
    )
    step(gradient=torch.tensor([float("inf"), 1.0]), weight=torch.tensor(0.0))
    step(gradient=torch.tensor([2.0, 4.0]), weight=torch.tensor(2.0))
    assert step.last_update.skipped is None and step.loss_scale == 2.0**16
    assert model.w.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("decides", ["host"])
@pytest.mark.parametrize("factor", ["logits * 0", "logits - logits", "logits / logits"])
def test_non_finite_values_are_not_simplified_away(decides, factor):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.other = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            logits = self.linear(x) * 1e30
            logits = (logits * 1e30) ** 2  # inf
            hidden = eval(factor, {"logits": logits})
            return {"loss": hidden.sum() + self.other.sum()}

    model = Hidden()
    twin = copy.deepcopy(model)
    step = compiled(model, optimizer=optim.SGD(lr=0.1), loss_scale=LossScale(decides=decides))
    before = everything(step)
    step(x=torch.ones(1, 2))
    twin(x=torch.ones(1, 2))["loss"].backward()
    overflows_in_eager = not all(parameter.grad.isfinite().all() for parameter in twin.parameters())
    assert overflows_in_eager
    assert step.last_update.skipped and same(before, everything(step))


# ---- resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decides", "at", "accumulate"),
    [("host", 2, 1), ("host", 4, 3), ("device", 7, 1), ("device", 7, 3)],
)
def test_resuming_anywhere_is_bit_exact_through_files(decides, at, accumulate, tmp_path):
    def make():
        scaling = LossScale(growth_interval=2, decides=decides)
        options = {"accumulate": accumulate, "clip_grad_norm": 1.0}
        return compiled(Regression(), optimizer=optim.AdamW(lr=0.1), loss_scale=scaling, **options)

    batches = regression_batches(10, bad=[1, 6])
    straight = make()
    for batch in batches:
        straight(**batch)
    first, second = make(), make()
    for batch in batches[:at]:
        first(**batch)
    graphopt.save_checkpoint(tmp_path / "saved", model=first.model, step=first)
    graphopt.load_checkpoint(tmp_path / "saved", model=second.model, step=second)
    for batch in batches[at:]:
        second(**batch)
    mine, its = second.state_dict(), straight.state_dict()
    assert mine["loss_scale"] == its["loss_scale"]
    assert same_tree(comparable({**mine, "random": None}), comparable({**its, "random": None}))
    assert all(torch.equal(p, q) for p, q in zip(second.model.parameters(), straight.model.parameters(), strict=True))


def test_a_state_from_before_loss_scaling_still_loads():
    old = compiled(Regression(), optimizer=optim.AdamW())
    old(**regression_batches(1)[0])
    assert "loss_scale" not in old.state_dict()
    new = compiled(Regression(), optimizer=optim.AdamW(), loss_scale="dynamic")
    new.load_state_dict(old.state_dict())
    assert new.loss_scale == 2.0**16 and new.state.updates == 1
    old.load_state_dict(new.state_dict())
    assert old.state.updates == 1


def test_an_open_window_under_another_scale_is_refused():
    def make(scale):
        return compiled(Regression(), optimizer=optim.SGD(lr=0.1), accumulate=2, loss_scale=scale)

    saved = make(1024.0)
    saved(**regression_batches(1)[0])
    for other in (None, 2048.0):
        step = make(other)
        with pytest.raises(StateError, match="scaled by 1024"):
            step.load_state_dict(saved.state_dict())
    make(1024.0).load_state_dict(saved.state_dict())
