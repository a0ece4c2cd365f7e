"""The engine of paged state: the update of a parameter, range by range, while others come and go.

::

    range 0    fetch . . . update  store
    range 1          fetch . . . . update  store
    range 2                        fetch . update  store         # into the staging buffer that range 0 left

Fetching and storing are the copier's work, on the CPU a thread, beside a CUDA device two streams. When the update
returns, all of its stores are over (on a device: ordered before what the stream does next).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphopt.capture.page_layout import PageLayout
from graphopt.capture.range_update import FACTOR, GRADIENT, OFFSET, PARAMETER, SEED
from graphopt.execute.cpu_copier import CpuCopier
from graphopt.execute.cuda_copier import CudaCopier
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.paging.flat_ranges import FlatRanges, flat
from graphopt.execute.paging.page_memory import PageMemory, known_memory
from graphopt.execute.paging.rules import RangeUpdate, installed
from graphopt.execute.parcel import Copier, Layout, Meter, Parcel
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


@dataclass
class _Range:
    """Elements ``start`` to ``stop`` with their state on its way into ``buffers``, one for each state tensor."""

    start: int
    stop: int
    buffers: tuple[Tensor, ...]
    parcels: tuple[Parcel, ...] = field(default=())


def new_copier(device: torch.device) -> Copier:
    """What moves state to ``device`` and back."""
    settings = FarMemory(keep=False)
    return CudaCopier(settings, device) if device.type == "cuda" else CpuCopier(settings)


class _PagedUpdate:
    """One run of an update; ``memory`` is None for pages that are ordinary memory (a trial's, a copy)."""

    def __init__(self, request: _Request, update: RangeUpdate, memory: PageMemory | None) -> None:
        self.request = request
        self.update = update
        self.memory = memory
        self.copier = memory.copier if memory is not None else new_copier(request.parameter.device)
        self.meter = memory.meter if memory is not None else Meter()
        numel, full = request.parameter.numel(), update.rule.range_elements
        self.whole: PageLayout = update.rule.layout(numel)
        self.staged: PageLayout = update.rule.layout(min(full, numel))
        self.bounds = [(start, min(start + full, numel)) for start in range(0, numel, full)]
        self.staging = [
            torch.empty(self.staged.nbytes, dtype=torch.uint8, device=request.parameter.device)
            for _ in range(min(NUM_STAGING, len(self.bounds)))
        ]
        self.ranges: list[_Range] = []
        self.parameter = flat(request.parameter)
        self.gradient = FlatRanges(request.gradient, request.parameter)

    def run(self) -> None:
        """Update parameter and pages."""
        try:
            for _ in range(NUM_STAGING - 1):
                self._fetch_next()
            for index in range(len(self.bounds)):
                self._compute(self.ranges[index])
                self._store(self.ranges[index])
                if index:
                    self._finish(self.ranges[index - 1])
                self._fetch_next()
            self._finish(self.ranges[-1])
        finally:
            # After a failure copies are under way, and must not outlive the buffers and the pages that they touch.
            for parcel in (parcel for part in self.ranges for parcel in part.parcels):
                self.copier.let_finish(parcel)
        if self.memory is not None:
            self.memory.evict()

    def _fetch_next(self) -> None:
        index = len(self.ranges)
        if index >= len(self.bounds):
            return
        start, stop = self.bounds[index]
        part = _Range(start, stop, self._buffers(self.staging[index % len(self.staging)], stop - start))
        part.parcels = tuple(self._parcels(part))
        self.ranges.append(part)
        for parcel, buffer in zip(part.parcels, part.buffers, strict=True):
            self.copier.fetch(parcel, buffer)
            self.meter.values_in += 1
            self.meter.bytes_in += parcel.layout.nbytes

    def _buffers(self, staging: Tensor, numel: int) -> tuple[Tensor, ...]:
        """The parts of a staging buffer that take the state of ``numel`` elements."""
        counts = [slot.elements(0, numel)[1] for slot in self.staged.slots]
        return tuple(
            staging[slot.start : slot.start + count * slot.dtype.itemsize].view(slot.dtype)
            for slot, count in zip(self.staged.slots, counts, strict=True)
        )

    def _parcels(self, part: _Range) -> Iterator[Parcel]:
        for slot, buffer in zip(self.whole.slots, part.buffers, strict=True):
            begin = slot.start + slot.elements(part.start, part.stop)[0] * slot.dtype.itemsize
            far = self.request.pages[begin : begin + buffer.nbytes]
            yield Parcel(0, Layout.of(buffer), self.copier, self.meter, slot=self.copier.slot_at(far))

    def _compute(self, part: _Range) -> None:
        with self.meter.waiting():
            for parcel, buffer in zip(part.parcels, part.buffers, strict=True):
                self.copier.wait_fetched(parcel, buffer)
        request, bucket = self.request, self.update.rule.bucket
        values = dict(zip((slot.name for slot in self.staged.slots), part.buffers, strict=True))
        values |= dict(zip(bucket.numbers, request.numbers, strict=True))
        values[PARAMETER] = self.parameter[part.start : part.stop]
        values[GRADIENT] = self.gradient.piece(part.start, part.stop)
        values |= {FACTOR: request.factor, SEED: request.seed, OFFSET: part.start}
        self.update.executable.run([values[name] for name in self.update.input_names])

    def _store(self, part: _Range) -> None:
        for parcel, buffer in zip(part.parcels, part.buffers, strict=True):
            self.copier.send(parcel, buffer)
            self.meter.values_out += 1
            self.meter.bytes_out += parcel.layout.nbytes

    def _finish(self, part: _Range) -> None:
        with self.meter.waiting():
            for parcel in part.parcels:
                self.copier.wait_sent(parcel)
        if self.memory is not None:
            self._evict(part)

    def _evict(self, part: _Range) -> None:
        assert self.memory is not None, "only far memory is let go of"
        for slot in self.whole.slots:
            start, stop = (slot.start + index * slot.dtype.itemsize for index in slot.elements(part.start, part.stop))
            self.memory.evict(start, stop)


def update_in_ranges(request: _Request, rule: str) -> None:
    """Run one update where parameter and pages lie."""
    memory = known_memory(request.pages)
    if memory is not None:
        memory.check_process()
    if _is_skipped(request.factor):
        return
    with torch.no_grad():
        _PagedUpdate(request, installed(rule), memory).run()


def _is_skipped(factor: Tensor | None) -> bool:
    """Whether nothing is to be written. A device decides by itself: asking it would stop the host."""
    return factor is not None and factor.device.type == "cpu" and not bool(torch.isfinite(factor))


@torch.library.impl("graphopt::paged_update_", "CompositeExplicitAutograd", lib=LIBRARY)
def _paged_update_(
    parameter: Tensor,
    gradient: Tensor,
    pages: Tensor,
    factor: Tensor | None,
    numbers: Sequence[float],
    rule: str,
    seed: int,
) -> None:
    update_in_ranges(_Request(parameter, gradient, pages, factor, numbers, seed), rule)


@torch.library.impl("graphopt::paged_update", "CompositeExplicitAutograd", lib=LIBRARY)
def _paged_update(
    parameter: Tensor,
    gradient: Tensor,
    pages: Tensor,
    factor: Tensor | None,
    numbers: Sequence[float],
    rule: str,
    seed: int,
) -> tuple[Tensor, Tensor]:
    new, kept = parameter.detach().clone(), pages.clone()
    update_in_ranges(_Request(new, gradient, kept, factor, numbers, seed), rule)
    return new, kept
