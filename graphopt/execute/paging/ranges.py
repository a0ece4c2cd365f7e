"""State on its way: ranges of one parameter's pages, fetched into staging buffers and stored back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.capture.range_update import RangeRule
from graphopt.execute.cpu_copier import CpuCopier
from graphopt.execute.cuda_copier import CudaCopier
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.paging.page_memory import known_memory
from graphopt.execute.parcel import Copier, Layout, Meter, Parcel


@dataclass(frozen=True)
class StateRange:
    """Elements ``start`` to ``stop`` of a parameter, with a buffer and a parcel for each of its state tensors."""

    start: int
    stop: int
    buffers: tuple[Tensor, ...]
    parcels: tuple[Parcel, ...]


def new_copier(device: torch.device) -> Copier:
    """What moves state to ``device`` and back."""
    settings = FarMemory(keep=False)
    return CudaCopier(settings, device) if device.type == "cuda" else CpuCopier(settings)


class PagedRanges:
    """The ranges of a parameter of ``numel`` elements on ``device`` under ``rule``; its state lies in ``pages``, which
    may also be ordinary memory (a trial's, a copy).
    """

    def __init__(self, pages: Tensor, rule: RangeRule, numel: int, device: torch.device) -> None:
        self.pages = pages
        self.device = device
        self.memory = known_memory(pages)
        self.copier = self.memory.copier if self.memory is not None else new_copier(device)
        self.meter = self.memory.meter if self.memory is not None else Meter()
        full = rule.range_elements
        self.whole = rule.layout(numel)
        self.staged = rule.layout(min(full, numel))
        self.bounds = tuple((start, min(start + full, numel)) for start in range(0, numel, full))

    def new_staging(self) -> Tensor:
        """A buffer for the state of one range."""
        return torch.empty(self.staged.nbytes, dtype=torch.uint8, device=self.device)

    def fetch(self, index: int, staging: Tensor) -> StateRange:
        """Start to fetch range ``index`` into ``staging``."""
        start, stop = self.bounds[index]
        buffers, parcels = [], []
        for slot, staged in zip(self.whole.slots, self.staged.slots, strict=True):
            first, last = slot.elements(start, stop)
            nbytes = (last - first) * slot.dtype.itemsize
            begin = slot.start + first * slot.dtype.itemsize
            buffer = staging[staged.start : staged.start + nbytes].view(slot.dtype)
            far = self.copier.slot_at(self.pages[begin : begin + nbytes])
            parcel = Parcel(0, Layout.of(buffer), self.copier, self.meter, slot=far)
            self.copier.fetch(parcel, buffer)
            self.meter.values_in += 1
            self.meter.bytes_in += nbytes
            buffers.append(buffer)
            parcels.append(parcel)
        return StateRange(start, stop, tuple(buffers), tuple(parcels))

    def wait_fetched(self, part: StateRange) -> None:
        """Return when the state of ``part`` may be read."""
        with self.meter.waiting():
            for parcel, buffer in zip(part.parcels, part.buffers, strict=True):
                self.copier.wait_fetched(parcel, buffer)

    def store(self, part: StateRange) -> None:
        """Start to write the state of ``part`` back."""
        for parcel, buffer in zip(part.parcels, part.buffers, strict=True):
            self.copier.send(parcel, buffer)
            self.meter.values_out += 1
            self.meter.bytes_out += buffer.nbytes

    def wait_stored(self, part: StateRange) -> None:
        """Return when the buffers of ``part`` may be used again; its pages go back to the system."""
        with self.meter.waiting():
            for parcel in part.parcels:
                self.copier.wait_sent(parcel)
        if self.memory is None:
            return
        for slot in self.whole.slots:
            first, last = slot.elements(part.start, part.stop)
            self.memory.evict(slot.start + first * slot.dtype.itemsize, slot.start + last * slot.dtype.itemsize)

    def let_finish(self, part: StateRange) -> None:
        """After a failure: return when no copy of ``part`` touches its buffers or the pages any more."""
        for parcel in part.parcels:
            self.copier.let_finish(parcel)
