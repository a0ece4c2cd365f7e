"""AdamW8bit, Adam8bit and Lion8bit: state in one byte an element, by blocks that share a scale."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import graphopt.operators.block_update  # noqa: F401  registers the operators
from graphopt.errors import UnsupportedError
from graphopt.optim.adam import Adam, AdamW
from graphopt.optim.base import Emit, Optimizer, ParameterUpdate, UpdateResult
from graphopt.optim.lion import Lion
from graphopt.optim.state import (
    DEFAULT_BLOCK,
    BlockRule,
    BlockState,
    ParameterFacts,
    PlainState,
    StateChoice,
    checked_block_format,
    scale_name,
)

_BLOCK_ADAM = torch.ops.graphopt.block_adam.default
_BLOCK_LION = torch.ops.graphopt.block_lion.default

DEFAULT_MIN_8BIT_SIZE = 4096
"""Elements. Smaller parameters are norms and biases: their state is nothing in bytes, and much in effect."""

_SLOW_DECAY = 0.99
"""beta2 from which on rounding to the nearest code stops the decay of the second moment, so that it is rounded by
chance; below it that costs a little and gains nothing."""

_DECOUPLED = True
"""Lion's weight decay."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Structure:
    plain: Any
    stochastic: bool


@dataclass(frozen=True, kw_only=True)
class _BlockOptions(Optimizer):
    """What all 8-bit optimizers share.

    ``state``: "auto" (by blocks for whole parameters of at least ``min_8bit_size`` elements and two dimensions, float32
    for the others), or for a group "int8", "fp32" or "bf16". ``embeddings``: whether embedding tables count
    like other parameters ("int8") or are left in "fp32". ``block``: elements that share a scale. ``map``: what a code
    means: "companded", "linear" or "dynamic" (that of bitsandbytes).
    """

    state: str = "auto"
    block: int = DEFAULT_BLOCK
    map: str = "companded"
    min_8bit_size: int = DEFAULT_MIN_8BIT_SIZE
    embeddings: str = "fp32"

    state_choices: ClassVar[tuple[str, ...]] = ("auto", "int8", "fp32", "bf16")

    def __post_init__(self) -> None:
        checked_block_format(self.block, self.map)
        if self.embeddings not in ("fp32", "int8"):
            raise UnsupportedError(f"embeddings expects 'fp32' or 'int8', came {self.embeddings!r}")
        super().__post_init__()

    @property
    def block_format(self) -> BlockState:
        """The format of state that is kept by blocks."""
        return BlockState(self.block, self.map)

    def state_choice(self, options: Mapping[str, Any], facts: ParameterFacts) -> StateChoice:
        state = options["state"]
        if facts.spec.dtype not in _FLOATS:
            return StateChoice(PlainState(), f"{facts.spec.dtype} is updated as torch does")
        if state == "int8":
            return StateChoice(self.block_format, "state='int8'")
        if state == "auto":
            return BlockRule(self.block_format, self.min_8bit_size, self.embeddings == "int8").choice(facts)
        return super().state_choice(options, facts)


@dataclass(frozen=True, kw_only=True)
class _BlockAdam(_BlockOptions, Adam):
    """``stochastic_state``: whether the second moment is rounded by chance (None: where beta2 is 0.99 or more)."""

    lr: float = 1e-3
    stochastic_state: bool | None = None

    def structure(self, options: Mapping[str, Any]) -> _Structure:
        chosen = self.stochastic_state
        stochastic = options["betas"][1] >= _SLOW_DECAY if chosen is None else chosen
        return _Structure(super().structure(options), stochastic)

    def rule(self, emit: Emit, update: ParameterUpdate, structure: Any) -> UpdateResult:
        return super().rule(emit, update, structure.plain)

    def block_rule(self, emit: Emit, update: ParameterUpdate, structure: Any) -> UpdateResult:
        names = _with_scales("exp_avg", "exp_avg_sq")
        numbers = ("lr", "weight_decay", "beta1", "beta2", "eps", "step")
        results = emit(
            _BLOCK_ADAM,
            update.parameter,
            update.gradient,
            *(update.state[name] for name in names),
            update.factor,
            *(update.numbers[name] for name in numbers),
            self.block,
            self.map,
            self.decoupled,
            structure.stochastic,
            update.rounds_stochastically,
            update.seed,
            update.offset,
        )
        return _unpacked(emit, results, names)


@dataclass(frozen=True, kw_only=True)
class Adam8bit(_BlockAdam, Adam):
    """Adam with state by blocks."""


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(_BlockAdam, AdamW):
    """AdamW with state by blocks."""

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Lion8bit(_BlockOptions, Lion):
    """Lion with state by blocks."""

    lr: float = 1e-4

    def block_rule(self, emit: Emit, update: ParameterUpdate, structure: Any) -> UpdateResult:
        names = _with_scales("exp_avg")
        numbers = ("lr", "weight_decay", "beta1", "beta2")
        results = emit(
            _BLOCK_LION,
            update.parameter,
            update.gradient,
            *(update.state[name] for name in names),
            update.factor,
            *(update.numbers[name] for name in numbers),
            update.numbers.get("update", 1.0),
            self.block,
            self.map,
            _DECOUPLED,
            update.rounds_stochastically,
            update.seed,
            update.offset,
        )
        return _unpacked(emit, results, names)


def _with_scales(*names: str) -> tuple[str, ...]:
    return tuple(part for name in names for part in (name, scale_name(name)))


def _unpacked(emit: Emit, results: Any, names: tuple[str, ...]) -> UpdateResult:
    """The parameter is the first result, state in the order of ``names`` follows."""
    parameter, *state = (emit(operator.getitem, results, position) for position in range(1 + len(names)))
    return UpdateResult(parameter, dict(zip(names, state, strict=True)))
