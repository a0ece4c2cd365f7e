"""Where the state and the numbers that a program reads come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt.capture.loss_scaling import GOOD_UPDATES, LOSS_SCALE
from graphopt.capture.update import WINDOW, WINDOW_LOSS, WINDOW_WEIGHT
from graphopt.execute.train_state import TrainState, zeros
from graphopt.ir.spec import Input, InputKind, TensorSpec


def state_source(state: TrainState, numbers: Mapping[str, float]) -> Callable[[Input], Any]:
    """What gives the value of a STATE or SCALAR input: a live tensor of ``state``, or one of ``numbers``."""
    return lambda entry: numbers[entry.name] if entry.kind is InputKind.SCALAR else _state_tensor(state, entry)


def no_state(entry: Input) -> Any:
    """For programs that read none."""
    raise AssertionError(f"a forward program reads no {entry.kind} {entry.name}")


def _state_tensor(state: TrainState, entry: Input) -> torch.Tensor:
    assert isinstance(entry.spec, TensorSpec)
    if entry.name in (LOSS_SCALE, GOOD_UPDATES):
        assert state.scaler is not None, "a program that unscales belongs to a step that scales"
        return state.scaler.state_tensor(entry.name)
    if entry.name in (WINDOW_WEIGHT, WINDOW_LOSS):
        attribute = "weight" if entry.name == WINDOW_WEIGHT else "loss"
        if getattr(state.window, attribute) is None:
            setattr(state.window, attribute, zeros(entry.spec))
        return getattr(state.window, attribute)  # type: ignore[no-any-return]
    state_name, _, name = entry.name.partition(".")
    if state_name == WINDOW:
        return state.window.tensor(name, entry.spec)
    return state.tensor(state_name, name, entry.spec)
