"""The live scale of the loss: what backward begins with, and how the scale follows overflows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphopt.capture.loss_scaling import GOOD_UPDATES, LOSS_SCALE
from graphopt.errors import StateError, UnsupportedError
from graphopt.ir.spec import TensorSpec
from graphopt.loss_scale import LARGEST_SCALE, LossScale

log = logging.getLogger(__name__)


class LossScaler:
    """The scale and the count of good updates as tensors on the parameters' device, and overflows in a row."""

    def __init__(self, options: LossScale, device: torch.device) -> None:
        self.options = options
        self.scale = torch.tensor(options.init, dtype=torch.float32, device=device)
        self.good_updates = torch.tensor(0, dtype=torch.int32, device=device)
        self.skipped_in_a_row = 0
        self._warned_at_floor = False  # since the last update that was applied

    @property
    def decides_on_device(self) -> bool:
        """Whether the compiled program decides if an update is applied, and changes the scale itself."""
        return self.options.decides_on(self.scale.device.type) == "device"

    def follow(self, device: torch.device) -> None:
        """Take over the device of parameters that were moved."""
        if device != self.scale.device:
            self.scale, self.good_updates = self.scale.to(device), self.good_updates.to(device)

    def state_tensor(self, name: str) -> torch.Tensor:
        """The tensor that the graph of the update knows as ``name``."""
        return {LOSS_SCALE: self.scale, GOOD_UPDATES: self.good_updates}[name]

    def tangent(self, spec: TensorSpec) -> torch.Tensor:
        """The scale in the loss's dtype and shape, a new tensor.

        A dynamic scale that the dtype cannot hold (65536 in float16) is inf there: gradients overflow, the update is
        skipped and the scale comes down. Raises UnsupportedError for a static one, which would never come down.
        """
        if not self.options.dynamic and self.options.init > torch.finfo(spec.dtype).max:
            raise UnsupportedError(
                f"the loss is {spec.dtype} and holds at most {torch.finfo(spec.dtype).max:g}, but loss_scale is "
                f"{self.options.init:g}: choose a smaller scale, or return the loss in float32"
            )
        return self.scale.to(spec.device, spec.dtype, copy=True).reshape(spec.shape)

    def note_applied(self) -> None:
        """An update was applied. Where the program decides, it has counted already."""
        self.skipped_in_a_row = 0
        self._warned_at_floor = False
        if self.decides_on_device or not self.options.dynamic:
            return
        self.good_updates += 1
        if int(self.good_updates) >= self.options.growth_interval:
            self.good_updates.zero_()
            self.scale.mul_(self.options.growth).clamp_(max=LARGEST_SCALE)

    def note_overflow(self, scale: float) -> None:
        """An update was skipped because gradients overflowed at ``scale``."""
        self.skipped_in_a_row += 1
        self._warn(scale)
        if self.decides_on_device or not self.options.dynamic:
            return
        self.good_updates.zero_()
        self.scale.mul_(self.options.backoff).clamp_(min=self.options.floor)

    def _warn(self, scale: float) -> None:
        options, in_a_row = self.options, self.skipped_in_a_row
        at_floor = options.dynamic and scale <= options.floor
        if at_floor and not self._warned_at_floor:
            self._warned_at_floor = True
            log.warning(
                "loss scaling: gradients overflow at the smallest loss scale, %g, so a smaller scale cannot help: look "
                "for inf or NaN in the batch and in the loss, lower the learning rate, or compute in bfloat16",
                scale,
            )
        elif in_a_row % options.warn_after == 0:
            log.warning(
                "loss scaling: %d updates in a row were skipped because gradients overflowed, the last at a loss scale "
                "of %g: nothing is being trained",
                in_a_row,
                scale,
            )

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The scale, the count of good updates, overflows in a row: plain numbers."""
        return {
            "scale": float(self.scale),
            "good_updates": int(self.good_updates),
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave; a static scale stays as it was asked for."""
        if self.options.dynamic:
            self.scale.fill_(max(saved["scale"], self.options.floor))
            self.good_updates.fill_(saved["good_updates"])
        self.skipped_in_a_row = saved["skipped_in_a_row"]


def device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    """The device of the first of ``parameters``, where the scale is kept."""
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def make_scaler(options: LossScale | None, parameters: Iterable[torch.Tensor]) -> LossScaler | None:
    """The scaler of a step that trains ``parameters``, on their device; None without options."""
    if options is None:
        return None
    return LossScaler(options, device_of(parameters))


def check_scaler_state(saved: Mapping[str, Any], scaler: LossScaler | None) -> None:
    """Raise StateError for a saved state whose open window was made under another loss scale, or that is damaged."""
    found = saved.get("loss_scale")
    if found is not None and set(found) != {"scale", "good_updates", "skipped_in_a_row"}:
        raise StateError(f"expected scale, good_updates and skipped_in_a_row of a loss scale, came {sorted(found)}")
    if not saved["window"]["micro_batches"]:
        return
    before = 1.0 if found is None else found["scale"]
    if scaler is None:
        after = 1.0
    elif scaler.options.dynamic and found is not None:
        after = max(found["scale"], scaler.options.floor)
    else:
        after = scaler.options.init
    if before != after:
        raise StateError(
            f"the saved window holds gradients of a loss scaled by {before:g}, but this step scales it by {after:g}: "
            f"compile with loss_scale as it was, or save between windows"
        )
