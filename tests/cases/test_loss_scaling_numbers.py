"""C21(b), C57, C15 and resuming under loss scaling: the same numbers as without, wherever they exist."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Accumulate, LossScale, optim
from graphopt.errors import StateError, UnsupportedError
from tests.support.saving import comparable, same_tree
from tests.support.scaling import Regression, compiled, everything, regression_batches, same
from tests.support.steps import TwoLayers

BOTH = pytest.mark.parametrize("decides", ["host", "device"])


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
