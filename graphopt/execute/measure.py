"""Measured memory: the allocator's own events while a function runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True)
class MemoryTrace:
    """Bytes above the level at the start, after each allocation or release, in time order.

    ``peak_bytes``: the highest level; ``end_bytes``: the level when the function had returned (its result still held).
    """

    levels: tuple[int, ...]
    peak_bytes: int
    end_bytes: int


def measure_memory(function: Callable[[], Any], *, device: torch.device | None = None) -> MemoryTrace:
    """The MemoryTrace of one call of ``function`` on the CPU's (default) or a CUDA device's allocator."""
    if device is not None and device.type == "cuda":
        return _measure_cuda(function, device)
    with _memory_profiler() as profiler:
        result = function()
    trace = _trace(_changes(profiler))
    del result
    return trace


def memory_changes(functions: Sequence[Callable[[], Any]], *, marker_bytes: int) -> list[list[int]]:
    """For each function, the allocation changes while it ran, its result held to the end.

    All run in one profiler session, told apart by a marker allocation of ``marker_bytes``.
    """
    with _memory_profiler() as profiler:
        for function in functions:
            torch.empty(marker_bytes, dtype=torch.uint8)
            result = function()
            torch.empty(marker_bytes, dtype=torch.uint8)
            del result
    return _between_markers(_changes(profiler), marker_bytes)


def _memory_profiler() -> torch.autograd.profiler.profile:
    # The profiler announces every start and stop on stderr unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.autograd.profiler.profile(profile_memory=True)


def _changes(profiler: torch.autograd.profiler.profile) -> list[int]:
    # The public event list is quadratic in the number of memory events; the raw one is read instead.
    assert profiler.kineto_results is not None, "the profiler has run"
    events = profiler.kineto_results.events()
    cpu = torch._C._autograd.DeviceType.CPU
    found = [
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]
        for event in events
        if event.name() == _MEMORY_EVENT and event.device_type() == cpu
    ]
    return [nbytes for _, nbytes in sorted(found, key=lambda item: item[0])]


def _trace(changes: Sequence[int]) -> MemoryTrace:
    level, levels = 0, []
    for change in changes:
        level += change
        levels.append(level)
    return MemoryTrace(tuple(levels), max(levels, default=0), level)


def _between_markers(changes: Sequence[int], marker_bytes: int) -> list[list[int]]:
    """Groups of changes between pairs of markers (each marker is one allocation and one release)."""
    groups: list[list[int]] = []
    inside, releases = False, 0
    for change in changes:
        if change == marker_bytes:
            continue
        if change == -marker_bytes:
            releases += 1
            inside = releases % 2 == 1
            if inside:
                groups.append([])
            continue
        if inside:
            groups[-1].append(change)
    return groups


def _measure_cuda(function: Callable[[], Any], device: torch.device) -> MemoryTrace:
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - start
    end = torch.cuda.memory_allocated(device) - start
    del result
    return MemoryTrace((peak, end), peak, end)
