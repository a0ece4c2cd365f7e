"""The update of one parameter: from what it is stored as to what it is updated in, the optimizer's rule, and back."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

import graphopt.operators.round_weights  # noqa: F401  registers the operators
from graphopt.capture.update_bucket import UPDATE_NUMBER, UpdateBucket
from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Emit, Number, Optimizer, ParameterUpdate, UpdateResult
from graphopt.optim.kept_state import MASTER, REMAINDER
from graphopt.optim.state import Weights

aten = torch.ops.aten
ours = torch.ops.graphopt


@dataclass(frozen=True)
class GradientSource:
    """A gradient as the backward part gives it, and what it is still to be multiplied by.

    ``scaled(node)``: ``node`` times that, in its dtype; ``factor()``: the same as one float32, None for nothing;
    ``scalar``: what ``scaled`` multiplies with, or where it ``divides`` divides by, None for nothing; ``widens``: in at
    least float32. ``seed`` (None: that of the parameter's name) and ``offset``: of the random numbers of the elements.
    """

    gradient: fx.Node
    scaled: Callable[[fx.Node], fx.Node]
    factor: Callable[[], fx.Node | None]
    scalar: fx.Node | None = None
    divides: bool = False
    widens: bool = False
    seed: fx.Node | None = None
    offset: fx.Node | int = 0


@dataclass(frozen=True)
class UpdatedParameter:
    """The new value of a parameter and of its state by name."""

    parameter: fx.Node
    state: Mapping[str, fx.Node]


class ParameterWriter:
    """Writes updates of single parameters at the end of ``program``."""

    def __init__(self, program: Program, emit: Emit, optimizer: Optimizer) -> None:
        self.program = program
        self.emit = emit
        self.optimizer = optimizer

    def update(
        self,
        name: str,
        source: GradientSource,
        state: Mapping[str, fx.Node],
        numbers: Mapping[str, fx.Node],
        bucket: UpdateBucket,
    ) -> UpdatedParameter:
        """The update of the parameter ``name``, whose state tensors are ``state``."""
        parameter = self.program.input_named(name)
        spec = self.program.spec(parameter)
        seed = seed_of(name) if source.seed is None else source.seed
        if bucket.is_by_blocks:
            weight = self._stored(parameter, state, bucket)
            update = ParameterUpdate(
                weight,
                source.gradient,
                state,
                numbers,
                factor=source.factor(),
                seed=seed,
                offset=source.offset,
                rounds_stochastically=bucket.weights is Weights.STOCHASTIC,
            )
            result = self.optimizer.block_rule(self.emit, update, bucket.structure)
        else:
            result = self._plain(parameter, source, state, numbers, bucket)
        return self._written(result, spec, numbers, (seed, source.offset), bucket)

    def _plain(
        self,
        parameter: fx.Node,
        source: GradientSource,
        state: Mapping[str, fx.Node],
        numbers: Mapping[str, fx.Node],
        bucket: UpdateBucket,
    ) -> UpdateResult:
        """The rule in ATen, all operands in the dtype in which the parameter is updated."""
        dtype = bucket.updated_spec(self.program.spec(parameter)).dtype
        weight = self._cast(self._stored(parameter, state, bucket), dtype)
        gradient = self._cast(source.scaled(self._widened(source.gradient, dtype)), dtype)
        own = {slot.name: slot.dtype for slot in bucket.slots if slot.name not in (MASTER, REMAINDER)}
        wide = {key: self._cast(state[key], dtype) for key in own}
        update = ParameterUpdate(weight, gradient, wide, numbers)
        result = self.optimizer.rule(self.emit, update, bucket.structure)
        kept = {key: self._cast(value, own[key] or dtype) for key, value in result.state.items()}
        return UpdateResult(result.parameter, kept)

    def _stored(self, parameter: fx.Node, state: Mapping[str, fx.Node], bucket: UpdateBucket) -> fx.Node:
        """What the parameter's digits are read from."""
        if bucket.weights is Weights.MASTER:
            return state[MASTER]
        if bucket.weights is Weights.REMAINDER:
            return self.emit(ours.join_remainder.default, parameter, state[REMAINDER])
        return parameter

    def _written(
        self,
        result: UpdateResult,
        spec: TensorSpec,
        numbers: Mapping[str, fx.Node],
        place: tuple[Number, Number],
        bucket: UpdateBucket,
    ) -> UpdatedParameter:
        """``result`` in the form in which the parameter is stored; ``place``: seed and offset of random numbers."""
        new = result.parameter
        if bucket.weights is Weights.MASTER:
            return UpdatedParameter(self._cast(new, spec.dtype), {**result.state, MASTER: new})
        if bucket.weights is Weights.REMAINDER:
            halves = self.emit(ours.split_remainder.default, new)
            high, low = (self.emit(operator.getitem, halves, position) for position in (0, 1))
            return UpdatedParameter(high, {**result.state, REMAINDER: low})
        if bucket.weights is Weights.STOCHASTIC and not bucket.is_by_blocks:
            rounded = self.emit(ours.round_stochastically.default, new, place[0], numbers[UPDATE_NUMBER], place[1])
            return UpdatedParameter(rounded, result.state)
        return UpdatedParameter(self._cast(new, spec.dtype), result.state)

    def _widened(self, gradient: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``gradient`` in at least ``dtype``: it is scaled in the wider of its own and the update's."""
        return self._cast(gradient, torch.promote_types(self.program.spec(gradient).dtype, dtype))

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if self.program.spec(node).dtype == dtype:
            return node
        return self.emit(aten._to_copy.default, node, dtype=dtype)


def seed_of(name: str) -> int:
    """The seed of the random numbers of the parameter ``name``: the same whatever is trained beside it."""
    return zlib.crc32(name.encode())
