"""Modules whose forward keeps a count in Python, which a graph would freeze."""

from __future__ import annotations

import torch

from graphopt.errors import CaptureError


def refuse_cumulative_averages(model: torch.nn.Module) -> None:
    """Raise CaptureError for a batch normalisation in training whose momentum is None (a cumulative average)."""
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.modules.batchnorm._NormBase) or not module.training:
            continue
        if module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"module {path or 'itself'!r} ({type(module).__name__}): momentum=None (cumulative average) is not "
                "supported: give a number"
            )
