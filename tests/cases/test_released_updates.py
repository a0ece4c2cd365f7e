"""Updates inside the backward: failures are never silent, interrupts wait, non-finite norms skip everything."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import StateError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return {"loss": self.second(self.norm(self.first(x)).tanh()).square().mean()}


class Intercepted:
    """``torch.ops.aten`` as the emitted code sees it; ``act`` is called at the ``at``-th operator looked up."""

    def __init__(self, at: int, act) -> None:
        self.left, self.act = at, act

    def __getattr__(self, name: str):
        self.left -= 1
        if not self.left:
            self.act()
        return getattr(torch.ops.aten, name)


def fail() -> None:
    raise MemoryError("no memory")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def make_step(**options):
    torch.manual_seed(0)
    model = Model()
    step = graphopt.compile(model, outputs=["loss"], optimizer=optim.AdamW(lr=0.1), **options)
    x = torch.randn(5, 6)
    step(x)
    return model, step, x


def intercept(monkeypatch, step, at: int, act) -> None:
    monkeypatch.setitem(step.last_executable.segments[-1].function.__globals__, "aten", Intercepted(at, act))


def everything(model, step):
    return copy.deepcopy((model.state_dict(), step.state_dict()))


def is_equal(first, second) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def num_calls(step, name: str) -> int:
    """How many operators the emitted function called ``name`` runs."""
    text = step.source.partition(f"def {name}(")[2].partition("\ndef ")[0]
    return text.count("= aten.")


def num_before_commit(step) -> int:
    return num_calls(step, "forward") + num_calls(step, "backward")


def test_updates_begin_inside_the_backward():
    _, step, _ = make_step()
    update = step.source.partition("def update(")[2]
    assert "grad of" in update and "aten.lerp_" in update


@pytest.mark.parametrize("from_end", [1, 12, 30])
def test_a_failure_between_two_updates_is_never_silent(monkeypatch, from_end):
    model, step, x = make_step()
    saved_model, saved = everything(model, step)
    at = num_before_commit(step) + num_calls(step, "update") + 1 - from_end
    assert at > num_before_commit(step) + 1
    with monkeypatch.context() as patched:
        intercept(patched, step, at, fail)
        with pytest.raises(StateError, match="partly written"):
            step(x)
    parameters = dict(model.named_parameters())
    assert any(not torch.equal(parameter, saved_model[name]) for name, parameter in parameters.items())
    assert all(torch.equal(buffer, saved_model[name]) for name, buffer in model.named_buffers())
    assert step.state.updates == 1
    with pytest.raises(StateError, match="load a saved model"):
        step(x)
    with pytest.raises(StateError, match="load a saved model"):
        step.flush()

    model.load_state_dict(saved_model)
    step.load_state_dict(saved)
    recovered = step(x).loss
    twin, twin_step, _ = make_step()
    assert torch.equal(recovered, twin_step(x).loss)
    assert is_equal(everything(model, step), everything(twin, twin_step))


@pytest.mark.parametrize("at", [1, 8])
def test_a_failure_before_the_first_update_changes_nothing(monkeypatch, at):
    model, step, x = make_step()
    before = everything(model, step)
    assert at <= num_before_commit(step)
    with monkeypatch.context() as patched:
        intercept(patched, step, at, fail)
        with pytest.raises(MemoryError):
            step(x)
    assert is_equal(everything(model, step), before) and step.broken is None
    step(x)


def test_without_release_no_failure_of_the_backward_changes_anything(monkeypatch):
    model, step, x = make_step(release_gradients=False)
    assert "grad of" not in step.source.partition("def update(")[2]
    before = everything(model, step)
    for at in range(1, num_before_commit(step) + 1):
        with monkeypatch.context() as patched:
            intercept(patched, step, at, fail)
            with pytest.raises(MemoryError):
                step(x)
        assert is_equal(everything(model, step), before) and step.broken is None


@pytest.mark.parametrize("from_end", [1, 12, 30])
def test_an_interrupt_during_a_released_update_comes_after_the_step(monkeypatch, from_end):
    model, step, x = make_step()
    at = num_before_commit(step) + num_calls(step, "update") + 1 - from_end
    assert at > num_before_commit(step) + 1
    with monkeypatch.context() as patched:
        intercept(patched, step, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(x)
    twin, twin_step, _ = make_step()
    twin_step(x)
    assert step.broken is None and step.state.updates == 2
    assert is_equal(everything(model, step), everything(twin, twin_step))


def test_an_interrupt_before_the_first_update_changes_nothing(monkeypatch):
    model, step, x = make_step()
    before = everything(model, step)
    with monkeypatch.context() as patched:
        intercept(patched, step, 3, interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(x)
    assert is_equal(everything(model, step), before) and step.broken is None


def test_a_norm_that_is_not_finite_skips_everything():
    model, step, x = make_step(clip_grad_norm=1.0)
    before_model, before = everything(model, step)
    step(torch.full_like(x, float("inf")))
    after_model, after = everything(model, step)
    assert "nan" in step.last_update.skipped and step.state.skipped == 1
    assert is_equal(after_model, before_model) and is_equal(after["state"], before["state"])
    step(x)
    assert step.last_update.skipped is None


def test_the_loss_is_that_of_the_parameters_before_the_update():
    model, step, x = make_step()
    expected = copy.deepcopy(model)(x)["loss"].detach()
    assert torch.equal(step(x).loss, expected)
    assert step.last_update.loss == float(expected)
