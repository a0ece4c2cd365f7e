"""A plain function as a module, so that everything behind it sees one kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphopt.errors import UnsupportedError


class FunctionModule(torch.nn.Module):
    """A module without parameters whose forward is ``function``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def as_module(model: torch.nn.Module | Callable[..., Any]) -> torch.nn.Module:
    """``model`` itself, or a module around a function; UnsupportedError for anything else."""
    if isinstance(model, torch.nn.Module):
        return model
    if callable(model) and not isinstance(model, type):
        return FunctionModule(model)
    raise UnsupportedError(f"model expects an nn.Module or a function, came {model!r}")
