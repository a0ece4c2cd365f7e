"""Scales of FP8 from what was seen in earlier steps, as operators.

``fp8_history_scales(history, largest, margin, most_recent, power_of_two)``: one scale for each row.
``fp8_first_scale(x, known, format, margin, power_of_two)``: ``known``, or that of x itself where nothing is known.

No operator asks the host. x is looked at only where nothing is known: a kernel finds that out for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.kernels.fp8_format import Format, format_named, group_amax, scale_of

LIBRARY = torch.library.Library("graphopt", "FRAGMENT")

LIBRARY.define(
    "fp8_history_scales(Tensor history, float[] largest, int margin, bool most_recent, bool power_of_two) -> Tensor"
)
LIBRARY.define("fp8_first_scale(Tensor x, Tensor known, str format, int margin, bool power_of_two) -> Tensor")

HISTORY_SCALES = torch.ops.graphopt.fp8_history_scales.default
FIRST_SCALE = torch.ops.graphopt.fp8_first_scale.default

UNKNOWN_SCALE = 0.0
"""What stands for a scale where the history holds nothing but zeros: of nothing seen, or of zeros."""


def history_scales(
    history: Tensor, largest: Sequence[float], margin: int, most_recent: bool, power_of_two: bool
) -> Tensor:
    """f32[T]: for each row of history f32[T,H] (the latest first) the scale under which ``2**margin`` times its largest
    value (or its latest) becomes ``largest``; ``UNKNOWN_SCALE`` where that value is 0."""
    amax = history[:, 0] if most_recent else history.amax(dim=1)
    # Not one tensor of all formats' largest numbers: it would have to be brought to the device in each step.
    scales = torch.empty_like(amax, memory_format=torch.contiguous_format)
    for number in sorted(set(largest)):
        rows = [i for i, other in enumerate(largest) if other == number]
        for start, stop in _stretches(rows):
            part = amax[start:stop]
            scale = _scale(part, Format("", torch.float8_e4m3fn, number), margin, power_of_two)
            scales[start:stop] = torch.where(part == 0, torch.full_like(scale, UNKNOWN_SCALE), scale)
    return scales


def first_scale(x: Tensor, known: Tensor, format: str, margin: int, power_of_two: bool) -> Tensor:
    """f32[1,1]: ``known`` f32[1,1] unless it is ``UNKNOWN_SCALE``; else the scale of x [M,K] as it is now."""
    if known.is_cuda:
        from graphopt.kernels import fp8_first_scale_triton  # Triton exists on Linux alone

        return fp8_first_scale_triton.first_scale(x, known, format, margin=margin, power_of_two=power_of_two)
    if known.device.type == "cpu" and float(known) != UNKNOWN_SCALE:
        return known.clone()
    present = _scale(group_amax(x, (0, 0)), format_named(format), margin, power_of_two)
    return torch.where(known == UNKNOWN_SCALE, present, known)


def _scale(amax: Tensor, format: Format, margin: int, power_of_two: bool) -> Tensor:
    # A value near the end of float32 times the margin is no reason to call the tensor infinite.
    roomy = torch.where(torch.isfinite(amax), (amax * 2.0**margin).clamp(max=torch.finfo(torch.float32).max), amax)
    return scale_of(roomy, format, power_of_two=power_of_two)


def _stretches(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ``rows`` as half-open ranges."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found


def _history_fake(
    history: Tensor, largest: Sequence[float], margin: int, most_recent: bool, power_of_two: bool
) -> Tensor:
    return torch.empty(history.shape[0], dtype=torch.float32, device=history.device)


def _first_fake(x: Tensor, known: Tensor, format: str, margin: int, power_of_two: bool) -> Tensor:
    return torch.empty((1, 1), dtype=torch.float32, device=x.device)


for _name, _run, _fake in (
    ("fp8_history_scales", history_scales, _history_fake),
    ("fp8_first_scale", first_scale, _first_fake),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt::{_name}", _fake, lib=LIBRARY)
