"""Everything ``graphopt.compile`` can be told, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphopt.checkpoint import Policy
from graphopt.errors import UnsupportedError
from graphopt.loss_scale import LossScale
from graphopt.optim.base import Optimizer
from graphopt.pipeline.pipeline import Pipeline, Verify
from graphopt.planner.decide import Budget
from graphopt.precision import FULL, Precision

Reduction = Literal["auto", "mean", "sum"]
DEFAULT_MAX_SIGNATURES = 8


@dataclass(frozen=True)
class Accumulate:
    """Gradient accumulation: ``steps`` micro-batches make one update.

    ``reduction``: "auto" weighs each micro-batch with the number of items its loss is a mean over, where the graph
    proves one (valid labels, elements, a divisor), so that the window equals the full batch; "mean" counts
    micro-batches equally; "sum" adds gradients. ``weight``: the output that holds the weight instead.
    """

    steps: int
    reduction: Reduction = "auto"
    weight: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise UnsupportedError(f"accumulate expects a whole number of micro-batches from 1 on, came {self.steps!r}")
        if self.reduction not in ("auto", "mean", "sum"):
            raise UnsupportedError(f"reduction expects 'auto', 'mean' or 'sum', came {self.reduction!r}")


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of ``graphopt.compile``, checked. See there for what each means."""

    outputs: tuple[str, ...] | None
    loss: str | Callable[[Any, Any], Any] | None
    optimizer: Optimizer | None
    accumulate: Accumulate
    clip_grad_norm: float | None
    backend: str
    dump: Path | None
    verify: Verify
    passes: tuple[Pipeline, Pipeline, Pipeline] | None
    max_signatures: int
    checkpoint: Policy | None = None
    memory: Budget | None = None
    release_gradients: bool = True
    precision: Precision = FULL
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        if self.backend not in ("aten", "inductor", "auto"):
            raise UnsupportedError(f"backend expects 'aten', 'inductor' or 'auto', came {self.backend!r}")
        if self.max_signatures < 1:
            raise UnsupportedError(f"max_signatures expects at least 1, came {self.max_signatures}")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise UnsupportedError(f"clip_grad_norm expects a positive number, came {self.clip_grad_norm!r}")
        if self.optimizer is None and (self.accumulate.steps > 1 or self.clip_grad_norm is not None):
            raise UnsupportedError(
                "accumulate and clip_grad_norm are part of the update and need optimizer=; without it, accumulate by "
                "calling backward() several times and clip with torch.nn.utils.clip_grad_norm_"
            )
