"""Adam and AdamW, equal to ``torch.optim`` bit by bit.

Rule (torch.optim.adam._single_tensor_adam, torch 2.13): decay (coupled into g, or p *= 1 - lr wd);
m = lerp(m, g, 1 - b1); v = b2 v + (1 - b2) g g; p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.errors import UnsupportedError
from graphopt.optim.base import Emit, Number, Optimizer, ParameterUpdate, UpdateResult, check_betas, check_range

aten = torch.ops.aten


@dataclass(frozen=True)
class _Structure:
    decays: bool


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam with the decay added to the gradient; options as in ``torch.optim.Adam``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    decoupled: ClassVar[bool] = False
    unsigned_state: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.amsgrad:
            raise UnsupportedError("amsgrad=True is not supported: it needs a third state of full size; use AdamW")

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_range("lr", options["lr"], 0.0)
        check_range("eps", options["eps"], 0.0)
        check_range("weight_decay", options["weight_decay"], 0.0)
        check_betas(options["betas"])

    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def structure(self, options: Mapping[str, Any]) -> Any:
        return _Structure(options["weight_decay"] != 0)

    def numbers(self, options: Mapping[str, Any], *, step: float, first: bool) -> dict[str, float]:
        beta1, beta2 = options["betas"]
        return {
            "lr": float(options["lr"]),
            "weight_decay": float(options["weight_decay"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(options["eps"]),
            "step": float(step),
        }

    def rule(self, emit: Emit, update: ParameterUpdate, structure: Any) -> UpdateResult:
        numbers, parameter, gradient = update.numbers, update.parameter, update.gradient
        if structure.decays and self.decoupled:
            decay = emit(operator.mul, numbers["lr"], numbers["weight_decay"])
            parameter = emit(aten.mul.Tensor, parameter, emit(operator.sub, 1, decay))
        elif structure.decays:
            gradient = emit(aten.add.Tensor, gradient, parameter, alpha=numbers["weight_decay"])
        average = emit(aten.lerp.Scalar, update.state["exp_avg"], gradient, emit(operator.sub, 1, numbers["beta1"]))
        decayed = emit(aten.mul.Tensor, update.state["exp_avg_sq"], numbers["beta2"])
        weight = emit(operator.sub, 1, numbers["beta2"])
        squares = emit(aten.addcmul.default, decayed, gradient, gradient, value=weight)
        root = emit(aten.div.Tensor, emit(aten.sqrt.default, squares), _correction_root(emit, numbers))
        denominator = emit(aten.add.Tensor, root, numbers["eps"])
        parameter = emit(aten.addcdiv.default, parameter, average, denominator, value=_step_size(emit, numbers))
        return UpdateResult(parameter, {"exp_avg": average, "exp_avg_sq": squares})


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay; options as in ``torch.optim.AdamW``."""

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True


def _correction_root(emit: Emit, numbers: Mapping[str, Number]) -> fx.Node:
    """sqrt(1 - beta2 ** step), in Python numbers as torch computes it."""
    correction = emit(operator.sub, 1, emit(operator.pow, numbers["beta2"], numbers["step"]))
    return emit(operator.pow, correction, 0.5)


def _step_size(emit: Emit, numbers: Mapping[str, Number]) -> fx.Node:
    """-lr / (1 - beta1 ** step)."""
    correction = emit(operator.sub, 1, emit(operator.pow, numbers["beta1"], numbers["step"]))
    return emit(operator.neg, emit(operator.truediv, numbers["lr"], correction))
