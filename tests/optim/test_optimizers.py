"""Parameter groups, schedules and refusals of optimizers; the facade that schedulers see."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import StateError, UnsupportedError


def mean_square(out, batch):
    return out.square().mean()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def compiled(model, optimizer, **options):
    return graphopt.compile(model, outputs=["loss"], loss=mean_square, optimizer=optimizer, **options)


def eager_step(model, optimizer, x):
    optimizer.zero_grad()
    mean_square(model(x), None).backward()
    optimizer.step()


def test_groups_by_pattern_parameter_and_predicate():
    model, x = network(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    definition = optim.AdamW(
        lr=1e-2,
        weight_decay=0.1,
        groups=[
            {"params": ["*.bias"], "weight_decay": 0.0, "lr": 3e-3},
            {"params": [model[1].weight], "betas": (0.5, 0.9)},
            {"params": lambda name, parameter: name.startswith("2.") and parameter.dim() == 2, "eps": 1e-3},
        ],
    )
    step = compiled(model, definition)
    reference = torch.optim.AdamW(
        [
            {"params": [twin[0].bias, twin[1].bias, twin[2].bias], "weight_decay": 0.0, "lr": 3e-3},
            {"params": [twin[1].weight], "betas": (0.5, 0.9)},
            {"params": [twin[2].weight], "eps": 1e-3},
            {"params": [twin[0].weight]},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )
    for _ in range(4):
        step(x)
        eager_step(twin, reference, x)
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    assert [len(group["params"]) for group in step.optimizer.param_groups] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    ],
)
def test_schedules_change_numbers_without_compiling_again(make_schedule):
    model, x = network(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    step = compiled(model, optim.AdamW(lr=1e-2))
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule, expected = make_schedule(step.optimizer), make_schedule(reference)
        for _ in range(6):
            step(x)
            schedule.step()
            eager_step(twin, reference, x)
            expected.step()
    assert schedule.get_last_lr() == expected.get_last_lr()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert step.steps.compiled == 1


def test_decay_switched_on_later_is_honoured():
    model, x = network(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    step = compiled(model, optim.SGD(lr=0.1))
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for decay in (0.0, 0.5, 0.25, 0.0):
        step.optimizer.param_groups[0]["weight_decay"] = decay
        reference.param_groups[0]["weight_decay"] = decay
        step(x)
        eager_step(twin, reference, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_state_is_torchs_own_and_loads_both_ways():
    model, x = network(), torch.randn(5, 6)
    twin = copy.deepcopy(model)
    step = compiled(model, optim.AdamW(lr=1e-2))
    for _ in range(3):
        step(x)
    twin.load_state_dict(model.state_dict())
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    reference.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for _ in range(2):
        step(x)
        eager_step(twin, reference, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    step.optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    step(x)
    eager_step(twin, reference, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_what_is_not_supported_says_what_to_do():
    with pytest.raises(UnsupportedError, match="negate the loss"):
        optim.SGD(lr=0.1, maximize=True)
    with pytest.raises(UnsupportedError, match="third state"):
        optim.AdamW(lr=0.1, amsgrad=True)
    with pytest.raises(ValueError, match="nesterov"):
        optim.SGD(lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="lr must be"):
        optim.AdamW(lr=-1.0)
    with pytest.raises(UnsupportedError, match="options out of"):
        optim.SGD(lr=0.1, groups=[{"params": ["*"], "betas": (0.9, 0.9)}])
    with pytest.raises(UnsupportedError, match="torch optimizer works with the compiled module"):
        graphopt.compile(network(), optimizer=torch.optim.SGD(network().parameters(), lr=0.1))


def test_group_mistakes_are_named():
    with pytest.raises(UnsupportedError, match=r"'\*\.scale', which no parameter matches"):
        compiled(network(), optim.SGD(lr=0.1, groups=[{"params": ["*.scale"], "lr": 0.0}]))
    with pytest.raises(UnsupportedError, match=r"'0.bias' is in groups 0 and 1"):
        compiled(network(), optim.SGD(lr=0.1, groups=[{"params": ["*.bias"]}, {"params": ["0.*"]}]))


def test_calling_step_of_the_facade_is_refused():
    step = compiled(network(), optim.SGD(lr=0.1))
    with pytest.raises(UnsupportedError, match="part of the compiled step"):
        step.optimizer.step()


def test_state_of_another_optimizer_or_model_is_refused_whole():
    model, x = network(), torch.randn(5, 6)
    step = compiled(model, optim.AdamW(lr=1e-2))
    step(x)
    saved = step.state_dict()
    other = compiled(network(), optim.SGD(lr=0.1))
    with pytest.raises(StateError, match="belongs to AdamW"):
        other.load_state_dict(saved)
    wider = compiled(nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 2)), optim.AdamW())
    with pytest.raises(StateError, match="has shape"):
        wider.load_state_dict(saved)
    with pytest.raises(StateError, match="expected a state dict"):
        step.load_state_dict({"state": {}})


def test_later_options_are_refused():
    with pytest.raises(UnsupportedError, match="accumulate and clip_grad_norm"):
        graphopt.compile(network(), clip_grad_norm=1.0)
