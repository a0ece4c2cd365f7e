"""The copier of the CPU: one thread that copies in the order it is asked, as a device's copy engine does.

On a CPU near and far memory are the same chips. This copier is for finding mistakes: it is really asynchronous, it can
be made slow and irregular, and what it holds is not counted by torch's allocator, so that plans can be measured.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
import weakref
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from graphopt.errors import OffloadError
from graphopt.execute.far_memory import FarMemory, FarPool, FarSlot
from graphopt.execute.parcel import Parcel


@dataclass(frozen=True)
class CopyPace:
    """How slow copies are: ``bytes_per_second`` at most (None: as fast as memory), and before each a random delay of up
    to ``random_seconds``, drawn from ``seed``.
    """

    bytes_per_second: float | None = None
    random_seconds: float = 0.0
    seed: int = 0


@dataclass
class _Shared:
    """What the thread and its copier share; the thread alone touches ``pool``."""

    pool: FarPool
    pace: CopyPace = CopyPace()
    draws: random.Random = field(default_factory=random.Random)
    is_stopping: bool = False

    def linger(self, nbytes: int) -> None:
        """Sleep as long as the pace asks for."""
        seconds = self.draws.random() * self.pace.random_seconds
        if self.pace.bytes_per_second is not None:
            seconds += nbytes / self.pace.bytes_per_second
        if seconds:
            time.sleep(seconds)


class _Job(Protocol):
    def run(self, shared: _Shared) -> None: ...


class _Copy:
    """One copy between ``tensor`` and far memory; holds ``tensor`` until it is over, as whoever asked may be gone."""

    def __init__(self, parcel: Parcel, tensor: Tensor, *, is_outward: bool) -> None:
        self.parcel = parcel
        self.tensor: Tensor | None = tensor
        self.is_outward = is_outward
        self.is_over = threading.Event()
        self.error: BaseException | None = None

    def run(self, shared: _Shared) -> None:
        try:
            if not self.parcel.is_dropped and not shared.is_stopping:
                shared.linger(self.parcel.layout.nbytes)
                self._move(shared.pool)
        except BaseException as error:
            self.error = error.with_traceback(None)  # a traceback would hold the frames, and they the tensor
        finally:
            self.tensor = None  # before the waiting thread goes on: what dies there must really be freed
            self.is_over.set()

    def _move(self, pool: FarPool) -> None:
        assert self.tensor is not None, "a copy runs once"
        parcel, near, nbytes = self.parcel, self.tensor.data_ptr(), self.parcel.layout.nbytes
        if self.is_outward:
            parcel.slot = parcel.slot or pool.take(nbytes)
            ctypes.memmove(parcel.slot.address, near, nbytes)
            return
        if parcel.slot is None:
            raise OffloadError("a value was asked back that never reached far memory; wait with offloaded() first")
        ctypes.memmove(near, parcel.slot.address, nbytes)

    def wait(self) -> None:
        """Return when the copy is over; raise what went wrong in it."""
        self.is_over.wait()
        if self.error is not None:
            message = str(self.error) if isinstance(self.error, OffloadError) else repr(self.error)
            raise OffloadError(f"copying {'out' if self.is_outward else 'in'} failed: {message}") from self.error


@dataclass(frozen=True)
class _Drop:
    """Behind all copies of its parcel in the queue, so that none touches the slot any more."""

    parcel: Parcel

    def run(self, shared: _Shared) -> None:
        if self.parcel.slot is not None:
            shared.pool.give_back(self.parcel.slot)
            self.parcel.slot = None


@dataclass(frozen=True)
class _Barrier:
    """Tells who waits that everything before it is done."""

    is_reached: threading.Event

    def run(self, shared: _Shared) -> None:
        self.is_reached.set()


class CpuCopier:
    """Copies in a thread of its own, which starts with the first value and ends with the copier or the interpreter."""

    def __init__(self, settings: FarMemory) -> None:
        self.settings = settings
        self._shared = _Shared(FarPool(settings))
        # put() of this queue may interrupt itself, as the finalizers that call drop() do.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one whose thread copies."""
        return os.getpid() != self._process

    def set_pace(self, pace: CopyPace) -> None:
        """Slow the copies down from now on; for tests of what depends on their order."""
        self._shared.draws = random.Random(pace.seed)
        self._shared.pace = pace

    def send(self, parcel: Parcel, value: Tensor) -> None:
        """Queue the copy of ``value`` to far memory."""
        parcel.outgoing = self._queue(_Copy(parcel, value, is_outward=True))

    def wait_sent(self, parcel: Parcel) -> None:
        """Block until ``value`` has been read."""
        self._refuse_fork()
        if parcel.outgoing is not None:
            parcel.outgoing.wait()
            parcel.outgoing = None

    def fetch(self, parcel: Parcel, buffer: Tensor) -> None:
        """Queue the copy from far memory into ``buffer``."""
        parcel.incoming[buffer.data_ptr()] = self._queue(_Copy(parcel, buffer, is_outward=False))

    def wait_fetched(self, parcel: Parcel, buffer: Tensor) -> None:
        """Block until ``buffer`` is filled."""
        self._refuse_fork()
        parcel.incoming.pop(buffer.data_ptr()).wait()

    def drop(self, parcel: Parcel) -> None:
        """Queue the release of the slot; copies that have not begun are left out."""
        parcel.is_dropped = True
        if not self.is_forked:
            self._jobs.put(_Drop(parcel))

    def slot_at(self, memory: Tensor) -> FarSlot:
        """Far memory that belongs to the caller."""
        return FarSlot(memory.nbytes, memory.data_ptr(), memory)

    def let_finish(self, parcel: Parcel) -> None:
        """Wait for copies that nobody has waited for."""
        for copy in (*parcel.incoming.values(), *([parcel.outgoing] if parcel.outgoing is not None else [])):
            copy.is_over.wait()
        parcel.incoming.clear()
        parcel.outgoing = None

    def far_bytes(self) -> tuple[int, int]:
        """Bytes held now and at most, when the queue is empty."""
        if self._thread is not None and not self.is_forked:
            is_reached = threading.Event()
            self._jobs.put(_Barrier(is_reached))
            is_reached.wait()
        return self._shared.pool.used_bytes, self._shared.pool.peak_bytes

    def _queue(self, copy: _Copy) -> _Copy:
        self._refuse_fork()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._shared), name="graphopt-offload", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _stop, self._jobs, self._shared, self._thread)
        self._jobs.put(copy)
        return copy

    def _refuse_fork(self) -> None:
        if self.is_forked:
            raise OffloadError(
                "this value left in another process, from which this one was forked, and the copying thread is not "
                "here: run forward and backward in one process"
            )


def _work(jobs: SimpleQueue[_Job | None], shared: _Shared) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job.run(shared)
        del job  # it holds a parcel, and must not do so while the thread waits for the next


def _stop(jobs: SimpleQueue[_Job | None], shared: _Shared, thread: threading.Thread) -> None:
    shared.is_stopping = True
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
