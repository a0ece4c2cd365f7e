"""What a program says about the values it quantizes to FP8: names of its inputs and outputs, and of the tensors."""

from __future__ import annotations

from dataclasses import dataclass

FP8_AMAX = "graphopt.fp8_amax"
"""A user output f32[T]: a number for each watched tensor and gradient, Inf or NaN if it holds one. No user's output can
be called so by accident."""

FP8_AMAX_BACKWARD = "graphopt.fp8_amax_backward"
"""The same of the backward part, where each part reports by itself (a module without an optimizer)."""

FP8_EVIDENCE = "graphopt.fp8_evidence"
"""A user output f32[]: 0, or NaN if one of those numbers is not finite."""

WINDOW_EVIDENCE = "window_fp8"
"""State: the sum of the evidence of a window's micro-batches."""

HISTORY = "fp8_history"
WEIGHT_HISTORY = "fp8_weight_history"
"""State f32[T,H]: the largest absolute values of T tensors in their last H micro-steps, the latest first; weights
apart from the rest, because they may be quantized less often."""

CALL_MARK = "#"
"""In the name of a tensor, before the number of the call of its module or of the slice, from the second on."""

SCALES = "fp8_scales"
"""State f32[T]: scales that the caller has found from the history."""

HELD_WEIGHT = "fp8_weight"
"""State ``fp8_weight.<n>``: codes and scales of weights that were quantized when a window was opened."""


def is_fp8_state(name: str) -> bool:
    """Whether the state ``name`` is a history, scales from one, evidence, or a weight that is held in FP8."""
    return name in (WINDOW_EVIDENCE, HISTORY, WEIGHT_HISTORY, SCALES) or name.startswith(f"{HELD_WEIGHT}.")


@dataclass(frozen=True)
class Fp8Watch:
    """The tensors that a program looks at when it quantizes them: module path and role, such as "mlp.up.input".

    ``reported``: for each number of FP8_AMAX, and then of FP8_AMAX_BACKWARD; ``gradients``: the parameters whose
    gradients the numbers behind them are of, which need not be quantized. ``delayed``, ``delayed_weights``: for each
    row of HISTORY (or number of SCALES) and of WEIGHT_HISTORY. ``formats``: for each number of SCALES.
    """

    reported: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    delayed: tuple[str, ...] = ()
    delayed_weights: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()


NOTHING_WATCHED = Fp8Watch()


def described(name: str) -> str:
    """The tensor ``name`` for people: "input of mlp.up"."""
    module, _, role = name.rpartition(".")
    return f"{role} of {module}" if module else role
