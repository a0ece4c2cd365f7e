"""The offload engine: what the four transfer operators do when a step runs.

Each executable that offloads has an engine, with far memory and a limit of its own. A ticket finds its parcel by number
in one table for the process, so a value can be brought back from any thread and by any executable, and two forwards of
one module before their backwards have parcels of their own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from graphopt.errors import OffloadError
from graphopt.execute.cpu_copier import CopyPace, CpuCopier
from graphopt.execute.cuda_copier import CudaCopier
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.parcel import Copier, Layout, Meter, Parcel
from graphopt.ir.transfer_ops import LIBRARY

_NUMBERS = itertools.count(1)
_PARCELS: dict[int, Parcel] = {}
_ACTIVE = threading.local()


@dataclass(frozen=True)
class OffloadStatistics:
    """What an engine has moved so far. ``wait_seconds``: how long calling threads were held up (about 0 on CUDA, where
    streams wait instead); ``far_bytes``: what is in far memory now; ``far_peak_bytes``: the most there was.
    """

    values_out: int
    bytes_out: int
    values_in: int
    bytes_in: int
    wait_seconds: float
    far_bytes: int
    far_peak_bytes: int


class OffloadEngine:
    """Sends values to far memory and brings them back; one copier a device, made when it is needed."""

    def __init__(self, settings: FarMemory | None = None) -> None:
        self.settings = settings or FarMemory()
        self._copiers: dict[torch.device, Copier] = {}
        self._pace = CopyPace()
        self._meter = Meter()

    @property
    def statistics(self) -> OffloadStatistics:
        """Counts so far, when all copies asked for are done."""
        far = [copier.far_bytes() for copier in self._copiers.values()]
        return OffloadStatistics(
            **asdict(self._meter), far_bytes=sum(now for now, _ in far), far_peak_bytes=sum(most for _, most in far)
        )

    def set_pace(self, pace: CopyPace) -> None:
        """Slow CPU copies down from now on; for tests of what depends on their order."""
        self._pace = pace
        for copier in self._copiers.values():
            if isinstance(copier, CpuCopier):
                copier.set_pace(pace)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, values that this thread sends go through this engine."""
        before = getattr(_ACTIVE, "engine", None)
        _ACTIVE.engine = self
        try:
            yield
        finally:
            _ACTIVE.engine = before

    def around(self, function: Callable[[Sequence[Any], list[Any]], Any]) -> Callable[[Sequence[Any], list[Any]], Any]:
        """``function``, an emitted segment, with this engine active in it."""

        def run(inputs: Sequence[Any], carried: list[Any]) -> Any:
            with self.active():
                return function(inputs, carried)

        return run

    def send(self, value: Tensor) -> Tensor:
        """A ticket for ``value``, whose copy out has been started."""
        layout = Layout.of(value)
        copier = self._copier(value.device)
        parcel = Parcel(next(_NUMBERS), layout, copier, self._meter)
        copier.send(parcel, value)
        self._meter.values_out += 1
        self._meter.bytes_out += layout.nbytes
        _PARCELS[parcel.number] = parcel
        ticket = torch.empty((), dtype=torch.int64).fill_(parcel.number)
        weakref.finalize(ticket, _forget, parcel.number).atexit = False
        return ticket

    def _copier(self, device: torch.device) -> Copier:
        if device not in self._copiers:
            self._copiers[device] = self._new_copier(device)
        return self._copiers[device]

    def _new_copier(self, device: torch.device) -> Copier:
        if device.type == "cuda":
            return CudaCopier(self.settings, device)
        if device.type != "cpu":
            raise OffloadError(f"offload expects tensors on the CPU or a CUDA device, came one on {device}")
        copier = CpuCopier(self.settings)
        copier.set_pace(self._pace)
        return copier


_DEFAULT = OffloadEngine(FarMemory(keep=False))
"""For programs that are interpreted, not compiled: no limit, and nothing is kept."""


@torch.library.impl("graphopt::offload", "CompositeExplicitAutograd", lib=LIBRARY)
def _offload(x: Tensor) -> Tensor:
    engine: OffloadEngine = getattr(_ACTIVE, "engine", None) or _DEFAULT
    return engine.send(x)


@torch.library.impl("graphopt::offloaded", "CompositeExplicitAutograd", lib=LIBRARY)
def _offloaded(ticket: Tensor, x: Tensor) -> Tensor:
    parcel = _parcel(ticket)
    with parcel.meter.waiting():
        parcel.copier.wait_sent(parcel)
    return ticket


@torch.library.impl("graphopt::prefetch", "CompositeExplicitAutograd", lib=LIBRARY)
def _prefetch(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    parcel = _parcel(ticket)
    layout = parcel.layout
    if (layout.shape, layout.dtype) != (tuple(size), dtype):
        raise OffloadError(
            f"ticket {parcel.number} stands for {layout}, but {dtype} of shape {tuple(size)} is expected"
        )
    # The layout that the value really had: where a fake value has other strides, the real ones are the right ones.
    buffer = layout.empty()
    parcel.copier.fetch(parcel, buffer)
    parcel.meter.values_in += 1
    parcel.meter.bytes_in += layout.nbytes
    return buffer


@torch.library.impl("graphopt::arrived", "CompositeExplicitAutograd", lib=LIBRARY)
def _arrived(buffer: Tensor, ticket: Tensor) -> Tensor:
    parcel = _parcel(ticket)
    with parcel.meter.waiting():
        parcel.copier.wait_fetched(parcel, buffer)
    return buffer


def _parcel(ticket: Tensor) -> Parcel:
    number = int(ticket)
    if number not in _PARCELS:
        raise OffloadError(
            f"ticket {number} stands for nothing in far memory of this process: its forward is over and its values are "
            "gone, or it comes from another process; run the forward again"
        )
    return _PARCELS[number]


def _forget(number: int) -> None:
    parcel = _PARCELS.pop(number, None)
    if parcel is not None:
        parcel.copier.drop(parcel)
