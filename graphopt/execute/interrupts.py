"""Holding signals while parameters and state are being written."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@functools.cache
def _numbers() -> tuple[int, ...]:
    return tuple(int(number) for number in signal.valid_signals())


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Signals with Python handlers (Ctrl-C among them) are delivered when the block has ended, not inside it.

    Outside the main thread Python runs no handlers, so there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    replaced = {}
    try:
        for number in _numbers():
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, lambda received, frame: pending.append((received, frame)))
                replaced[number] = handler
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for number, frame in pending:
            replaced[int(number)](number, frame)  # type: ignore[operator]
