"""Lion: the sign of an average of gradients, with decoupled weight decay.

Rule (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2): p *= 1 - lr wd;
p -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphopt.optim.base import Emit, Optimizer, ParameterUpdate, UpdateResult, check_betas, check_range

aten = torch.ops.aten


@dataclass(frozen=True)
class _Structure:
    decays: bool


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion; ``betas``: of the average whose sign is taken, and of the one that is kept."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    counts_steps: ClassVar[bool] = False

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_range("lr", options["lr"], 0.0)
        check_range("weight_decay", options["weight_decay"], 0.0)
        check_betas(options["betas"])

    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def structure(self, options: Mapping[str, Any]) -> _Structure:
        return _Structure(options["weight_decay"] != 0)

    def numbers(self, options: Mapping[str, Any], *, step: float, first: bool) -> dict[str, float]:
        beta1, beta2 = options["betas"]
        return {
            "lr": float(options["lr"]),
            "weight_decay": float(options["weight_decay"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
        }

    def rule(self, emit: Emit, update: ParameterUpdate, structure: _Structure) -> UpdateResult:
        numbers, parameter, gradient = update.numbers, update.parameter, update.gradient
        if structure.decays:
            decay = emit(operator.mul, numbers["lr"], numbers["weight_decay"])
            parameter = emit(aten.mul.Tensor, parameter, emit(operator.sub, 1, decay))
        average = update.state["exp_avg"]
        direction = _mixed(emit, average, gradient, numbers["beta1"])
        step_size = emit(operator.neg, numbers["lr"])
        parameter = emit(aten.add.Tensor, parameter, emit(aten.sign.default, direction), alpha=step_size)
        return UpdateResult(parameter, {"exp_avg": _mixed(emit, average, gradient, numbers["beta2"])})


def _mixed(emit: Emit, average: Any, gradient: Any, beta: Any) -> Any:
    """beta * average + (1 - beta) * gradient."""
    return emit(aten.lerp.Scalar, average, gradient, emit(operator.sub, 1, beta))
