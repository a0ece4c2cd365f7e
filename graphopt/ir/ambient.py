"""Switching the user's autocast off around graphs that already hold its casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, operators run on the dtypes they are given."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def plain_execution() -> Iterator[None]:
    """Inside, no gradients are recorded and no autocast applies: what an emitted graph expects."""
    with torch.no_grad(), without_autocast():
        yield
