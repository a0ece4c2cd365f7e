"""How the state of one parameter is kept, tensor by tensor, and what must be saved so that it can be read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.ir.spec import TensorSpec
from graphopt.optim.state import BlockState, StateChoice, Weights, scale_name

MASTER = "master"
REMAINDER = "remainder"
STEP = "step"
UPDATED = "updated"

_WEIGHT_LABELS = {
    Weights.MASTER: "float32 master",
    Weights.REMAINDER: "16 more bits of the weight",
    Weights.STOCHASTIC: "weight rounded by chance",
}


@dataclass(frozen=True)
class KeptState:
    """The state tensors of one parameter by name, their format with its reason, and what keeps its weight exact."""

    choice: StateChoice
    weights: Weights
    specs: Mapping[str, TensorSpec]
    parameter: TensorSpec

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors (a step count of 4 bytes left out)."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def block_format(self) -> BlockState | None:
        """The format if the moments are kept by blocks."""
        return self.choice.format if isinstance(self.choice.format, BlockState) else None

    @property
    def label(self) -> str:
        """The format as people read it: ``float32``, ``int8 by blocks of 256, companded + float32 master``."""
        parts = [self._moments_label(), _WEIGHT_LABELS.get(self.weights, "")]
        return " + ".join(part for part in parts if part) or "none"

    def _moments_label(self) -> str:
        if self.block_format is not None:
            return str(self.block_format)
        moments = [spec.dtype for name, spec in self.specs.items() if name not in (MASTER, REMAINDER)]
        return str(moments[0]).removeprefix("torch.") if moments else ""

    def record(self, values: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """What the codes of a state by blocks mean, in plain numbers and strings; None for other formats.

        Blocks follow the memory of the codes, so the order of dimensions there belongs to it: of those in ``values``,
        or of codes that lie like the parameter.
        """
        kept = self.block_format
        if kept is None:
            return None
        codes = next((value for key, value in (values or {}).items() if scale_name(key) in self.specs), None)
        lies = self.parameter if codes is None else TensorSpec.of(codes)
        return {"block": kept.block, "map": kept.map, "order": list(memory_order(lies))}


def memory_order(spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions of more than one element, from the slowest in memory to the fastest."""
    dimensions = [position for position, size in enumerate(spec.shape) if size != 1]
    return tuple(sorted(dimensions, key=lambda position: -spec.stride[position]))


def copied_state(values: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Copies of ``values`` in their dtypes, in the parameter's memory layout and on its device; the step on its own."""
    return {key: _copied(key, value, parameter) for key, value in values.items()}


def _copied(key: str, value: Any, parameter: torch.Tensor) -> Any:
    if key == STEP:
        return as_step(value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def as_step(value: Any) -> torch.Tensor:
    """A step count (a number or one element) as the float32 scalar that torch keeps."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float32, copy=True).reshape(())
    return torch.tensor(float(value))
