"""A value in far memory, and what a device must be able to do for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from graphopt.execute.far_memory import FarMemory


@dataclass(frozen=True)
class Layout:
    """Shape, strides, dtype and device of a value that left."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> Layout:
        """The layout of ``value``."""
        return cls(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the first element to the end of the last, gaps included."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Fresh memory of this layout, on its device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class Meter:
    """What an engine has moved, and how long calling threads were held up by it."""

    values_out: int = 0
    bytes_out: int = 0
    values_in: int = 0
    bytes_in: int = 0
    wait_seconds: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside counts as waiting."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - started


@dataclass
class Parcel:
    """One value on its way out, in far memory, or on its way back.

    ``number``: what its ticket says. ``outgoing``: the copy out until it was waited for; ``incoming``: copies in by the
    address of their buffer, each until it was waited for. ``is_dropped``: its ticket has died.
    """

    number: int
    layout: Layout
    copier: Copier
    meter: Meter
    slot: Any = None
    outgoing: Any = None
    incoming: dict[int, Any] = field(default_factory=dict)
    is_dropped: bool = False


class Copier(Protocol):
    """What moves values of one device. The calls come in this order for a parcel; ``drop`` may come after any of them,
    in any thread, and must not free memory under a copy."""

    settings: FarMemory

    def send(self, parcel: Parcel, value: Tensor) -> None:
        """Start to copy ``value`` out."""

    def wait_sent(self, parcel: Parcel) -> None:
        """Return when ``value`` may be overwritten by what the calling thread does next."""

    def fetch(self, parcel: Parcel, buffer: Tensor) -> None:
        """Start to copy into ``buffer``."""

    def wait_fetched(self, parcel: Parcel, buffer: Tensor) -> None:
        """Return when ``buffer`` may be read by what the calling thread does next."""

    def drop(self, parcel: Parcel) -> None:
        """The far memory of ``parcel`` may be used again, once no copy touches it."""

    def slot_at(self, memory: Tensor) -> Any:
        """The slot of a parcel whose far memory is ``memory``, a flat tensor of the caller's; such a parcel is sent as
        often as it is fetched, ends with ``let_finish`` and is never dropped."""

    def let_finish(self, parcel: Parcel) -> None:
        """Return when no copy of ``parcel`` touches what the calling thread does next; never raises."""

    def far_bytes(self) -> tuple[int, int]:
        """Bytes in far memory now, when all that was asked for is done, and the most there ever were."""
