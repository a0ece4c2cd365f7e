"""The device that is measured, and how long something takes on it."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UP_RUNS = 2


def measured_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_slug(device: torch.device) -> str:
    """The device in the name of a file: ``nvidia-h200``, ``cpu``."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def seconds_of(run: Callable[[], Any], rounds: int, device: torch.device) -> tuple[float, ...]:
    """Seconds of each of ``rounds`` runs after those that warm up: events of the stream on a GPU, else the clock."""
    for _ in range(_WARM_UP_RUNS):
        run()
    if device.type != "cuda":
        return tuple(_clocked(run) for _ in range(rounds))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda.synchronize(device)
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return tuple(begin.elapsed_time(end) / 1e3 for begin, end in events)


def copy_bytes_per_second(device: torch.device, num_bytes: int, rounds: int) -> float:
    """Bytes read and written in a second by a copy of ``num_bytes``: what the memory of ``device`` gives."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(seconds_of(lambda: target.copy_(source), rounds, device))


def _clocked(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
