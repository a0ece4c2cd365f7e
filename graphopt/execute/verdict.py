"""Whether an update may be applied, from the numbers that the program computes of all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.capture.loss_scaling import OVERFLOW
from graphopt.capture.update import GRAD_NORM
from graphopt.ir.program import Program
from graphopt.ir.spec import OutputKind


@dataclass(frozen=True)
class Verdict:
    """The global norm (with clipping), and why the update is skipped, if it is.

    ``overflowed``: gradients of a scaled loss are not finite; ``is_empty``: a window holds nothing to train on.
    """

    norm: float | None
    skipped: str | None = None
    overflowed: bool = False
    is_empty: bool = False


EMPTY_WINDOW = Verdict(None, "the window holds no item to train on", is_empty=True)


@dataclass(frozen=True)
class Evidence:
    """What a verdict is found from, as tensors: reading them waits for their device.

    ``overflow``: 0, or NaN if a scaled gradient is not finite.
    """

    norm: Any = None
    overflow: Any = None
    weight: Any = None

    def verdict(self) -> Verdict:
        """What the numbers say."""
        norm = None if self.norm is None else float(self.norm)
        if self.weight is not None and float(self.weight) == 0.0:
            return EMPTY_WINDOW
        if self.overflow is not None and float(self.overflow) != 0.0:
            return Verdict(norm, "a gradient of the scaled loss is not finite", overflowed=True)
        if norm is not None and norm - norm != 0:
            return Verdict(norm, f"the gradient norm is {norm}")
        return Verdict(norm)


def evidence(program: Program, outputs: Sequence[Any], *, weight: Any = None) -> Evidence:
    """The numbers among ``outputs``; ``weight``: that of a window, where nobody has looked at it."""
    found = {
        output.name: outputs[position]
        for position, output in program.signature.outputs_of(OutputKind.USER)
        if output.name in (GRAD_NORM, OVERFLOW)
    }
    missing = [name for name, value in found.items() if value is None]
    assert not missing, f"{missing} must be computed before the first parameter is written"
    return Evidence(found.get(GRAD_NORM), found.get(OVERFLOW), weight)
