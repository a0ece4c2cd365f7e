"""Schedules move only if an update was applied since they moved last."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import graphopt
from graphopt import LossScale, optim
from graphopt.execute import schedules as schedules_module
from graphopt.execute.schedules import Schedules

BAD, GOOD = torch.full((1, 2), float("inf")), torch.ones(1, 2)


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        yield


@pytest.fixture
def optimizer():
    found = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    found.zero_grad()
    return found


def applied(optimizer, schedules):
    optimizer.step()
    schedules.note_applied()


def half(_):
    return 0.5


class OwnStep(lr_scheduler.StepLR):
    """Overrides step(), takes an argument and counts."""

    calls = 0

    def step(self, metric=None):
        self.calls += 1
        super().step()


MAKERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
    "OwnStep": lambda o: OwnStep(o, 1, gamma=0.5),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "Chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "Nested": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.1, total_iters=1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[1]
            ),
            lr_scheduler.ExponentialLR(o, 0.5),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_schedule_equals_one_that_saw_only_applied_updates(name):
    pattern = [True, False, True, True, False, False, True, True]
    rates = {}
    for skips in (False, True):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedules, scheduler = Schedules(optimizer), MAKERS[name](optimizer)
        rates[skips] = []
        for is_applied in pattern:
            if is_applied:
                applied(optimizer, schedules)
            elif skips:
                schedules.note_skipped()
            else:
                continue
            before = copy.deepcopy(comparable_state(scheduler))
            scheduler.step()
            assert is_applied or comparable_state(scheduler) == before
            if is_applied:
                rates[skips].append(optimizer.param_groups[0]["lr"])
        assert getattr(scheduler, "calls", None) in (None, 1 + sum(pattern))
    assert rates[True] == rates[False]


def comparable_state(scheduler):
    state = scheduler.state_dict()
    return {key: repr(value) if key == "lr_lambdas" else value for key, value in state.items()}


def test_a_first_update_that_is_skipped_holds_without_a_warning(optimizer):
    schedules, scheduler = Schedules(optimizer), lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    schedules.note_skipped()
    scheduler.step()
    assert scheduler.last_epoch == 0
    applied(optimizer, schedules)
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_several_schedules_of_one_optimizer_rest_and_others_do_not(optimizer):
    schedules = Schedules(optimizer)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    mine = [lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.StepLR(optimizer, 1)]
    free = lr_scheduler.ExponentialLR(other, 0.5)
    other.step()
    schedules.note_skipped()
    for scheduler in (*mine, free):
        scheduler.step()
    assert [scheduler.last_epoch for scheduler in (*mine, free)] == [0, 0, 1]


def test_a_schedule_by_epochs_does_not_lose_one_to_a_skipped_last_update(optimizer):
    schedules, scheduler = Schedules(optimizer), lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for epoch in (1, 2):
        for _ in range(3):
            applied(optimizer, schedules)
        schedules.note_skipped()
        scheduler.step()
        assert scheduler.last_epoch == epoch


def test_a_schedule_made_later_is_found(optimizer):
    schedules = Schedules(optimizer)
    first = lr_scheduler.StepLR(optimizer, 1)
    applied(optimizer, schedules)
    del first
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    schedules.note_skipped()
    scheduler.step()
    assert scheduler.last_epoch == 0


def test_a_plateau_schedule_rests_with_its_metric(optimizer):
    schedules, scheduler = Schedules(optimizer), lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    schedules.note_skipped()
    scheduler.step(1.0)
    assert scheduler.last_epoch == 0 and scheduler.best == float("inf")


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_state_pickle_and_copy_of_a_resting_schedule_are_those_of_any_other(optimizer, protocol):
    schedules, scheduler = Schedules(optimizer), lr_scheduler.LambdaLR(optimizer, half)
    expected, keys = scheduler.state_dict(), set(vars(scheduler))
    schedules.note_skipped()
    assert scheduler.state_dict() == expected and set(vars(scheduler)) == keys
    assert isinstance(scheduler, lr_scheduler.LambdaLR) and type(scheduler).__name__ == "LambdaLR"
    for other in (pickle.loads(pickle.dumps(scheduler, protocol)), copy.copy(scheduler)):
        assert type(other) is lr_scheduler.LambdaLR
        assert other.state_dict() == expected
    scheduler.load_state_dict({**expected, "last_epoch": 7})
    scheduler.step()
    assert scheduler.last_epoch == 7
    applied(optimizer, schedules)
    assert type(scheduler) is lr_scheduler.LambdaLR
    scheduler.step()
    assert scheduler.last_epoch == 8


def test_a_resting_schedule_is_not_kept_alive(optimizer):
    schedules, scheduler = Schedules(optimizer), lr_scheduler.StepLR(optimizer, 1)
    schedules.note_skipped()
    gone = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert gone() is None


def test_the_heap_is_looked_through_once_while_nothing_is_new(optimizer, monkeypatch):
    looks = []
    real = gc.get_objects
    monkeypatch.setattr(schedules_module.gc, "get_objects", lambda: looks.append(1) or real())
    schedules = Schedules(optimizer)
    schedulers = [lr_scheduler.StepLR(optimizer, 1)]
    for _ in range(5):
        schedules.note_applied()
    assert len(looks) <= 2
    seen = len(looks)
    schedulers.append(lr_scheduler.StepLR(optimizer, 1))
    schedules.note_applied()
    assert len(looks) == seen + 1


def test_what_is_not_known_yet_is_asked_for_when_a_schedule_moves(optimizer):
    schedules, scheduler = Schedules(optimizer), lr_scheduler.StepLR(optimizer, 1)
    asked = []

    def find_out(then):
        return lambda: (asked.append(1), then())

    optimizer.step()
    schedules.hold_until_known(find_out(schedules.note_applied))
    assert asked == []
    scheduler.step()
    assert scheduler.last_epoch == 1 and asked == [1]
    schedules.hold_until_known(find_out(schedules.note_skipped))
    scheduler.step()
    scheduler.step()
    assert scheduler.last_epoch == 1 and asked == [1, 1]


@pytest.mark.parametrize("reason", ["norm", "empty window", "overflow"])
def test_every_reason_to_skip_holds_the_schedule(reason):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x, weight):
            return {"loss": (x @ self.w).sum() / weight, "weight": weight}

    options = {
        "norm": {"clip_grad_norm": 1.0},
        "empty window": {"accumulate": graphopt.Accumulate(2, weight="weight")},
        "overflow": {"loss_scale": LossScale()},
    }[reason]
    optimizer = optim.SGD(lr=1.0)
    step = graphopt.compile(Weighted(), outputs=["loss", "weight"], optimizer=optimizer, backend="aten", **options)
    schedule = lr_scheduler.ExponentialLR(step.optimizer, 0.5)

    def window(x, weight):
        for _ in range(2 if reason == "empty window" else 1):
            step(x, torch.tensor(weight))
        schedule.step()

    window(BAD if reason != "empty window" else GOOD, 1.0 if reason != "empty window" else 0.0)
    assert step.last_update.skipped and schedule.last_epoch == 0
    window(GOOD, 1.0)
    assert step.last_update.skipped is None and schedule.last_epoch == 1
