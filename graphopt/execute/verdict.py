"""Whether an update may be applied, from the numbers that the program computes of all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.capture.loss_scaling import OVERFLOW
from graphopt.capture.update import GRAD_NORM
from graphopt.execute.fp8_state import Seen, not_finite
from graphopt.ir.fp8_watch import FP8_AMAX, FP8_EVIDENCE
from graphopt.ir.program import Program
from graphopt.ir.spec import OutputKind


@dataclass(frozen=True)
class Verdict:
    """The global norm (with clipping), and why the update is skipped, if it is.

    ``overflowed``: gradients of a scaled loss are not finite; ``is_empty``: a window holds nothing to train on;
    ``fp8``: why quantized values make it be skipped, if they do.
    """

    norm: float | None
    skipped: str | None = None
    overflowed: bool = False
    is_empty: bool = False
    fp8: str | None = None


EMPTY_WINDOW = Verdict(None, "the window holds no item to train on", is_empty=True)


@dataclass(frozen=True)
class Evidence:
    """What a verdict is found from, as tensors: reading them waits for their device.

    ``overflow``: 0, or NaN if a scaled gradient is not finite; ``fp8``: 0, or NaN if a quantized tensor or a
    gradient beside it is not, and ``seen`` says which.
    """

    norm: Any = None
    overflow: Any = None
    weight: Any = None
    fp8: Any = None
    seen: tuple[Seen, ...] = ()

    def verdict(self) -> Verdict:
        """What the numbers say."""
        norm = None if self.norm is None else float(self.norm)
        if self.weight is not None and float(self.weight) == 0.0:
            return EMPTY_WINDOW
        quantized = not_finite(self.seen) if self.fp8 is not None and float(self.fp8) != 0.0 else None
        if self.overflow is not None and float(self.overflow) != 0.0:
            reasons = ["a gradient of the scaled loss is not finite", *([] if quantized is None else [quantized])]
            return Verdict(norm, "; ".join(reasons), overflowed=True)
        if quantized is not None:
            return Verdict(norm, quantized, fp8=quantized)
        if norm is not None and norm - norm != 0:
            return Verdict(norm, f"the gradient norm is {norm}")
        return Verdict(norm)


def evidence(program: Program, outputs: Sequence[Any], *, weight: Any = None, seen: Sequence[Seen] = ()) -> Evidence:
    """The numbers among ``outputs``; ``weight``: that of a window, where nobody has looked at it; ``seen``: by the
    window's micro-steps."""
    found = {
        output.name: outputs[position]
        for position, output in program.signature.outputs_of(OutputKind.USER)
        if output.name in (GRAD_NORM, OVERFLOW, FP8_EVIDENCE)
    }
    missing = [name for name, value in found.items() if value is None]
    assert not missing, f"{missing} must be computed before the first parameter is written"
    seen = (*seen, *seen_by(program, outputs))
    return Evidence(found.get(GRAD_NORM), found.get(OVERFLOW), weight, found.get(FP8_EVIDENCE), seen)


def seen_by(program: Program, outputs: Sequence[Any]) -> tuple[Seen, ...]:
    """What ``program`` saw when it quantized, and of gradients; empty if it does not quantize."""
    users, watch = program.signature.outputs_of(OutputKind.USER), program.fp8.watch
    return tuple(Seen(watch.reported, outputs[i], watch.gradients) for i, output in users if output.name == FP8_AMAX)
