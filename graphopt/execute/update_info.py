"""What ``step.last_update`` says about an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class UpdateInfo:
    """One update: mean loss of its window, global gradient norm (with clipping), and why it was skipped, if it was.

    ``loss_scale``: what the loss was multiplied by before backward (loss and norm are those of the unscaled loss).
    """

    loss: float
    grad_norm: float | None
    micro_batches: int
    weight: float
    skipped: str | None = None
    loss_scale: float | None = None


class DeviceUpdate:
    """UpdateInfo of a step on a device: the loss is fetched only when somebody looks."""

    micro_batches = 1
    weight = 1.0
    skipped = None

    def __init__(self, loss: torch.Tensor, grad_norm: float | None) -> None:
        # A copy: the loss handed to the user must be free to die with the result.
        self._loss = loss.clone()
        self.grad_norm = grad_norm

    @property
    def loss(self) -> float:
        """The loss as a Python number."""
        return float(self._loss)


def update_info(loss: Any, grad_norm: float | None) -> Any:
    """What a step of one micro-batch says about itself, without waiting for a device."""
    if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
        return DeviceUpdate(loss, grad_norm)
    return UpdateInfo(float(loss), grad_norm, micro_batches=1, weight=1.0)
