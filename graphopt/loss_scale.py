"""How much the loss is multiplied by before backward, so that small float16 gradients do not become 0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from graphopt.errors import UnsupportedError

Decides = Literal["auto", "host", "device"]

LARGEST_SCALE = 2.0**126
"""The scale grows no further: a larger power of two is not finite in float32, or its reciprocal is not normal."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of the loss and how it follows overflows.

    ``init``: the first scale. ``dynamic``: whether it changes at all. An update whose gradients overflow is skipped and
    the scale multiplied by ``backoff``, down to ``floor``; after ``growth_interval`` updates in a row it is multiplied
    by ``growth``. ``warn_after``: skipped updates in a row after which a warning is logged.

    ``decides``: where it is decided whether an update is applied. "host": between backward and update, in Python;
    "device": in the compiled program, which then selects old or new values, and Python learns of it later; "auto": on
    the device where that is not the CPU.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    dynamic: bool = True
    warn_after: int = 10
    decides: Decides = "auto"

    def __post_init__(self) -> None:
        _check("init", self.init, 0.0 < self.init <= LARGEST_SCALE, "a number above 0 and at most 2**126")
        _check("growth", self.growth, 1.0 < self.growth < math.inf, "a number above 1")
        _check("backoff", self.backoff, 0.0 < self.backoff < 1.0, "a number between 0 and 1")
        for name in ("growth_interval", "warn_after"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, int) and value >= 1, "a whole number from 1 on")
        if self.dynamic:
            _check("floor", self.floor, 0.0 < self.floor <= self.init, f"a number above 0 and at most {self.init}")
        if self.decides not in ("auto", "host", "device"):
            raise UnsupportedError(f"decides expects 'auto', 'host' or 'device', came {self.decides!r}")

    @classmethod
    def static(cls, scale: float, *, warn_after: int = 10, decides: Decides = "auto") -> LossScale:
        """A scale that never changes; updates that overflow are still skipped."""
        return cls(init=scale, dynamic=False, warn_after=warn_after, decides=decides)

    def decides_on(self, device_type: str) -> Literal["host", "device"]:
        """Where it is decided for parameters on a ``device_type`` such as "cuda"."""
        if self.decides == "auto":
            return "host" if device_type == "cpu" else "device"
        return self.decides


def default_loss_scale(precision: Any) -> LossScale | None:
    """A dynamic scale if ``precision`` (a name or a value with ``compute``) computes in float16, else None."""
    return LossScale() if getattr(precision, "compute", precision) == "fp16" else None


def loss_scale_of(value: Any, *, precision: Any) -> LossScale | None:
    """What ``loss_scale=`` means: "auto" (by ``precision``), "dynamic", a number, a LossScale, or None for no scale.

    Raises UnsupportedError for anything else.
    """
    if value is None or isinstance(value, LossScale):
        return value
    if value == "auto":
        return default_loss_scale(precision)
    if value == "dynamic":
        return LossScale()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return LossScale.static(float(value))
    raise UnsupportedError(
        f"loss_scale expects 'dynamic', a number, a graphopt.LossScale, None or 'auto', came {value!r}"
    )


def _check(name: str, value: Any, is_right: bool, expected: str) -> None:
    if not is_right or isinstance(value, bool):
        raise UnsupportedError(f"{name} of a LossScale expects {expected}, came {value!r}")
