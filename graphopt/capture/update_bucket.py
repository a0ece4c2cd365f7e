"""Parameters that are updated alike, and the state that each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Optimizer
from graphopt.optim.kept_state import MASTER, REMAINDER
from graphopt.optim.state import AS_TORCH, BlockState, Initial, StateFormat, StateSlot, Weights

UPDATE_NUMBER = "update"

_WEIGHT_SLOTS: dict[Weights, tuple[StateSlot, ...]] = {
    Weights.MASTER: (StateSlot(MASTER, torch.float32, initial=Initial.PARAMETER),),
    Weights.REMAINDER: (StateSlot(REMAINDER, torch.int16),),
}


@dataclass(frozen=True)
class UpdateBucket:
    """Parameters that share a group, a step count and a format, and so their numbers: ``lr.0``, ``step.0``, ...

    ``slots``: the state tensors of each parameter; ``weights``: how a parameter in 2 bytes an element is kept exact;
    ``is_paged``: whether the state lies in far memory and is updated there, range by range.
    """

    name: str
    parameters: tuple[str, ...]
    structure: Any
    numbers: tuple[str, ...]
    slots: tuple[StateSlot, ...]
    format: StateFormat = AS_TORCH
    weights: Weights = Weights.OWN
    is_paged: bool = False

    @property
    def is_by_blocks(self) -> bool:
        """Whether the optimizer's rule by blocks is used, which takes parameters and gradients as they are."""
        return isinstance(self.format, BlockState)

    def updated_spec(self, parameter: TensorSpec) -> TensorSpec:
        """The spec in which ``parameter`` is updated: at least float32, unless all is as torch does it."""
        if self.weights is Weights.OWN and self.format == AS_TORCH:
            return parameter
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return TensorSpec(parameter.shape, dtype, parameter.stride, parameter.device)

    def state_specs(self, parameter: TensorSpec) -> dict[str, TensorSpec]:
        """The specs of the state of one parameter, by name."""
        updated = self.updated_spec(parameter)
        return {slot.name: slot.spec(updated) for slot in self.slots}

    def state_bytes(self, parameter: TensorSpec) -> int:
        """Bytes of the state of one parameter."""
        return sum(spec.nbytes for spec in self.state_specs(parameter).values())


def make_bucket(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    *,
    name: str,
    parameters: tuple[str, ...],
    state_format: StateFormat | None = None,
    weights: Weights = Weights.OWN,
    is_paged: bool = False,
) -> UpdateBucket:
    """The bucket of ``parameters`` under a group's ``options``; their state is kept as torch does by default."""
    state_format = state_format or AS_TORCH
    numbers = tuple(optimizer.numbers(options, step=1.0, first=True))
    moments = state_format.slots(optimizer.state_names(options), optimizer.unsigned_state)
    return UpdateBucket(
        name=name,
        parameters=parameters,
        structure=optimizer.structure(options),
        numbers=(*numbers, UPDATE_NUMBER) if weights is Weights.STOCHASTIC else numbers,
        slots=(*_WEIGHT_SLOTS.get(weights, ()), *moments),
        format=state_format,
        weights=weights,
        is_paged=is_paged,
    )
