"""SGD with momentum, dampening and Nesterov, equal to ``torch.optim.SGD`` bit by bit.

Rule (torch.optim.sgd._single_tensor_sgd, torch 2.13): g += wd p; buf = mu buf + (1 - dampening) g, the first time
buf = g; g = g + mu buf (Nesterov) or buf; p -= lr g.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphopt.optim.base import Emit, Optimizer, ParameterUpdate, UpdateResult, check_range

aten = torch.ops.aten


@dataclass(frozen=True)
class _Structure:
    decays: bool
    has_momentum: bool
    nesterov: bool


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent; options as in ``torch.optim.SGD``."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    counts_steps: ClassVar[bool] = False
    takes_complex: ClassVar[bool] = True

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_range("lr", options["lr"], 0.0)
        check_range("momentum", options["momentum"], 0.0)
        check_range("weight_decay", options["weight_decay"], 0.0)
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError("nesterov=True needs momentum above 0 and dampening 0")

    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if options["momentum"] != 0 else ()

    def structure(self, options: Mapping[str, Any]) -> _Structure:
        return _Structure(options["weight_decay"] != 0, options["momentum"] != 0, bool(options["nesterov"]))

    def numbers(self, options: Mapping[str, Any], *, step: float, first: bool) -> dict[str, float]:
        # The first buffer is the gradient itself: 0 * momentum + (1 - 0) * g, without dampening.
        dampening = 0.0 if first else float(options["dampening"])
        names = ("lr", "momentum", "weight_decay")
        return {**{name: float(options[name]) for name in names}, "dampening": dampening}

    def rule(self, emit: Emit, update: ParameterUpdate, structure: _Structure) -> UpdateResult:
        numbers, gradient, state = update.numbers, update.gradient, {}
        if structure.decays:
            gradient = emit(aten.add.Tensor, gradient, update.parameter, alpha=numbers["weight_decay"])
        if structure.has_momentum:
            decayed = emit(aten.mul.Tensor, update.state["momentum_buffer"], numbers["momentum"])
            weight = emit(operator.sub, 1, numbers["dampening"])
            buffer = emit(aten.add.Tensor, decayed, gradient, alpha=weight)
            state["momentum_buffer"] = buffer
            if structure.nesterov:
                gradient = emit(aten.add.Tensor, gradient, buffer, alpha=numbers["momentum"])
            else:
                gradient = buffer
        step_size = emit(operator.neg, numbers["lr"])
        return UpdateResult(emit(aten.add.Tensor, update.parameter, gradient, alpha=step_size), state)
