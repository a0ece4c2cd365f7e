"""Where the state and the numbers that a program reads come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt.capture.accumulation import WINDOW, WINDOW_LOSS, WINDOW_WEIGHT
from graphopt.capture.loss_scaling import GOOD_UPDATES, LOSS_SCALE
from graphopt.execute.train_state import TrainState
from graphopt.ir.fp8_watch import HELD_WEIGHT, NOTHING_WATCHED, SCALES, WINDOW_EVIDENCE, Fp8Watch, is_fp8_state
from graphopt.ir.spec import Input, InputKind, TensorSpec


def state_source(
    state: TrainState, numbers: Mapping[str, float], watch: Fp8Watch = NOTHING_WATCHED
) -> Callable[[Input], Any]:
    """What gives the value of a STATE or SCALAR input: a live tensor of ``state``, or one of ``numbers``.

    ``watch``: the tensors whose histories the program reads.
    """

    def value(entry: Input) -> Any:
        if entry.kind is InputKind.SCALAR:
            return numbers[entry.name]
        assert isinstance(entry.spec, TensorSpec)
        if is_fp8_state(entry.name):
            return _fp8_tensor(state, entry.name, watch, entry.spec)
        return _state_tensor(state, entry)

    return value


def _fp8_tensor(state: TrainState, name: str, watch: Fp8Watch, spec: TensorSpec) -> torch.Tensor:
    assert state.fp8 is not None, "a program that quantizes to FP8 belongs to a step that does"
    if name == WINDOW_EVIDENCE:
        return state.fp8.window_evidence(spec)
    if name.startswith(f"{HELD_WEIGHT}."):
        return state.fp8.weights.tensor(name)
    if name == SCALES:
        return state.fp8.scales(watch, spec)
    return state.fp8.table(name, watch, spec)


def _state_tensor(state: TrainState, entry: Input) -> torch.Tensor:
    assert isinstance(entry.spec, TensorSpec)
    if entry.name in (LOSS_SCALE, GOOD_UPDATES):
        assert state.scaler is not None, "a program that unscales belongs to a step that scales"
        return state.scaler.state_tensor(entry.name)
    if entry.name in (WINDOW_WEIGHT, WINDOW_LOSS):
        return state.window.total("weight" if entry.name == WINDOW_WEIGHT else "loss", entry.spec)
    state_name, _, name = entry.name.partition(".")
    if state_name == WINDOW:
        return state.window.tensor(name, entry.spec)
    return state.tensor(state_name, name, entry.spec)
