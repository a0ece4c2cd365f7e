"""The engine of paged state: the update of a parameter, range by range, while others come and go.

::

    range 0    fetch . . . update  store
    range 1          fetch . . . . update  store
    range 2                        fetch . update  store         # into the staging buffer that range 0 left

Fetching and storing are the copier's work, on the CPU a thread, beside a CUDA device two streams. When the update
returns, all of its stores are over (on a device: ordered before what the stream does next). The first range may be on
its way before the update runs, in a buffer that ``page_in`` returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphopt.capture.range_update import FACTOR, GRADIENT, OFFSET, PARAMETER, SEED
from graphopt.execute.paging.flat_ranges import FlatRanges
from graphopt.execute.paging.page_memory import known_memory
from graphopt.execute.paging.ranges import PagedRanges, StateRange
from graphopt.execute.paging.rules import RangeUpdate, installed
from graphopt.kernels.flat_tensors import flat
from graphopt.operators.paged_update import LIBRARY

NUM_STAGING = 3
"""Staging buffers: one that is updated, one whose fetch was asked for before, one that is stored or fetched next."""


@dataclass(frozen=True)
class _Request:
    """The arguments of one update."""

    parameter: Tensor
    gradient: Tensor
    pages: Tensor
    factor: Tensor | None
    numbers: Sequence[float]
    seed: int
    first: Tensor | None


@dataclass(frozen=True)
class _Flight:
    """A first range under way into a buffer that no update has taken yet."""

    ranges: PagedRanges
    part: StateRange


_FLIGHTS: dict[int, _Flight] = {}
"""By the address of the buffer. A flight holds no reference to the buffer's own tensor, whose death ends it."""


class _PagedUpdate:
    """One run of an update; ``flight``: its first range, if that is on its way."""

    def __init__(self, request: _Request, update: RangeUpdate, flight: _Flight | None) -> None:
        parameter = request.parameter
        self.request = request
        self.update = update
        self.parameter = flat(parameter.detach())
        self.gradient = FlatRanges(request.gradient, parameter)
        self.ranges = PagedRanges(request.pages, update.rule, parameter.numel(), parameter.device)
        num_buffers = min(NUM_STAGING, len(self.ranges.bounds))
        given = [] if request.first is None else [request.first]
        self.staging = given + [self.ranges.new_staging() for _ in range(num_buffers - len(given))]
        self.parts: list[StateRange] = [] if flight is None else [flight.part]

    def run(self) -> None:
        """Update parameter and pages."""
        try:
            while len(self.parts) < NUM_STAGING - 1 and self._fetch_next():
                pass
            for index in range(len(self.ranges.bounds)):
                self.ranges.wait_fetched(self.parts[index])
                self._compute(self.parts[index])
                self.ranges.store(self.parts[index])
                if index:
                    self.ranges.wait_stored(self.parts[index - 1])
                self._fetch_next()
            self.ranges.wait_stored(self.parts[-1])
        finally:
            # After a failure copies are under way, and must not outlive the buffers and the pages that they touch.
            for part in self.parts:
                self.ranges.let_finish(part)
        if self.ranges.memory is not None:
            self.ranges.memory.evict()

    def _fetch_next(self) -> bool:
        """Start the next fetch; whether there was one to start."""
        index = len(self.parts)
        if index >= len(self.ranges.bounds):
            return False
        self.parts.append(self.ranges.fetch(index, self.staging[index % len(self.staging)]))
        return True

    def _compute(self, part: StateRange) -> None:
        request, bucket = self.request, self.update.rule.bucket
        values = dict(zip((slot.name for slot in self.ranges.whole.slots), part.buffers, strict=True))
        values |= dict(zip(bucket.numbers, request.numbers, strict=True))
        values[PARAMETER] = self.parameter[part.start : part.stop]
        values[GRADIENT] = self.gradient.piece(part.start, part.stop)
        values |= {FACTOR: request.factor, SEED: request.seed, OFFSET: part.start}
        self.update.executable.run([values[name] for name in self.update.input_names])


def update_in_ranges(request: _Request, rule: str) -> None:
    """Run one update where parameter and pages lie."""
    memory = known_memory(request.pages)
    if memory is not None:
        memory.check_process()
    flight = None if request.first is None else _FLIGHTS.pop(request.first.data_ptr(), None)
    is_skipped = _is_skipped(request.factor)
    # What comes from other pages would go back there: the form that returns new pages works on a copy.
    if flight is not None and (is_skipped or flight.ranges.pages.data_ptr() != request.pages.data_ptr()):
        flight.ranges.let_finish(flight.part)
        flight = None
    if is_skipped:
        return
    with torch.no_grad():
        _PagedUpdate(request, installed(rule), flight).run()


def _is_skipped(factor: Tensor | None) -> bool:
    """Whether nothing is to be written. A device decides by itself: asking it would stop the host."""
    return factor is not None and factor.device.type == "cpu" and not bool(torch.isfinite(factor))


def _end_flight(address: int) -> None:
    """Nobody will take the buffer: a step was skipped, or failed."""
    flight = _FLIGHTS.pop(address, None)
    if flight is not None:
        flight.ranges.let_finish(flight.part)


@torch.library.impl("graphopt::page_in", "CompositeExplicitAutograd", lib=LIBRARY)
def _page_in(pages: Tensor, staging: int, rule: str, numel: int, *, device: torch.device) -> Tensor:
    memory = known_memory(pages)
    if memory is not None:
        memory.check_process()
    ranges = PagedRanges(pages, installed(rule).rule, numel, device)
    buffer = ranges.new_staging()
    _FLIGHTS[buffer.data_ptr()] = _Flight(ranges, ranges.fetch(0, buffer))
    weakref.finalize(buffer, _end_flight, buffer.data_ptr()).atexit = False
    return buffer


def _write_update(
    parameter: Tensor,
    gradient: Tensor,
    pages: Tensor,
    factor: Tensor | None,
    numbers: Sequence[float],
    rule: str,
    seed: int,
    staging: int,
    first: Tensor | None = None,
) -> None:
    update_in_ranges(_Request(parameter, gradient, pages, factor, numbers, seed, first), rule)


def _new_values(parameter: Tensor, gradient: Tensor, pages: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    new, kept = parameter.detach().clone(), pages.clone()
    _write_update(new, gradient, kept, *rest, **named)
    return new, kept


torch.library.impl("graphopt::paged_update_", "CompositeExplicitAutograd", _write_update, lib=LIBRARY)
torch.library.impl("graphopt::paged_update", "CompositeExplicitAutograd", _new_values, lib=LIBRARY)
