"""The copier of a CUDA device: two streams beside the computing one, page-locked memory, events.

Never run on a GPU so far; tests run it against stand-ins for streams and events that check the order of its calls.

Streams, for a value x made on the computing stream and read there again as y::

    out:      wait(compute) . wait(last copy of the slot) . slot <- x . record(sent)
    compute:  ... wait(sent) . x is freed, its memory goes to what is computed next
    back:     wait(compute), so that what had y's memory before is over . wait(sent) . y <- slot . record(fetched)
    compute:  wait(fetched) . reads y

x and y are held here until the computing stream waits for their copy. If that wait never comes, the ticket's death
makes the computing stream wait, and only then lets go of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.execute.far_memory import FarMemory, check_budget
from graphopt.execute.parcel import Parcel


@dataclass
class _PinnedSlot:
    """Far memory; ``last``: the event behind the last copy that touched it."""

    memory: Tensor
    last: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Flight:
    """A copy under way: what it holds on the device, the event behind it, the stream that must wait for it."""

    tensor: Tensor
    done: torch.cuda.Event
    compute: torch.cuda.Stream


class CudaCopier:
    """Copies on streams of its own; the calling thread never blocks."""

    def __init__(self, settings: FarMemory, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._free: dict[int, list[_PinnedSlot]] = {}
        # Appended to by finalizers, which may run anywhere; emptied where a slot is needed.
        self._returned: deque[_PinnedSlot] = deque()
        self._used_bytes = 0
        self._free_bytes = 0
        self._peak_bytes = 0

    def send(self, parcel: Parcel, value: Tensor) -> None:
        """Start the copy out behind what the current stream has been given so far."""
        slot = parcel.slot or self._take(parcel.layout.nbytes)
        compute = torch.cuda.current_stream(self.device)
        self._out.wait_stream(compute)
        parcel.slot = slot
        parcel.outgoing = self._copy(slot, slot.memory, _bytes_of(value, parcel), value, self._out, compute)

    def wait_sent(self, parcel: Parcel) -> None:
        """Let the current stream wait for the copy out."""
        if parcel.outgoing is not None:
            torch.cuda.current_stream(self.device).wait_event(parcel.outgoing.done)
            parcel.outgoing = None

    def fetch(self, parcel: Parcel, buffer: Tensor) -> None:
        """Start the copy in behind what the current stream has been given so far."""
        compute = torch.cuda.current_stream(self.device)
        self._back.wait_stream(compute)
        target = _bytes_of(buffer, parcel)
        flight = self._copy(parcel.slot, target, parcel.slot.memory, buffer, self._back, compute)
        parcel.incoming[buffer.data_ptr()] = flight

    def wait_fetched(self, parcel: Parcel, buffer: Tensor) -> None:
        """Let the current stream wait for the copy in."""
        torch.cuda.current_stream(self.device).wait_event(parcel.incoming.pop(buffer.data_ptr()).done)

    def drop(self, parcel: Parcel) -> None:
        """Let the computing stream wait for what is in flight, then let go of it."""
        parcel.is_dropped = True
        flights = [*parcel.incoming.values(), *([parcel.outgoing] if parcel.outgoing is not None else [])]
        for flight in flights:
            flight.compute.wait_event(flight.done)
        parcel.incoming.clear()
        parcel.outgoing = None
        if parcel.slot is not None:
            self._returned.append(parcel.slot)
            parcel.slot = None

    def slot_at(self, memory: Tensor) -> _PinnedSlot:
        """Far memory that belongs to the caller, who lets streams wait for each copy in it."""
        return _PinnedSlot(memory.view(torch.uint8))

    def let_finish(self, parcel: Parcel) -> None:
        """Let the computing stream wait for what is in flight."""
        for flight in (*parcel.incoming.values(), *([parcel.outgoing] if parcel.outgoing is not None else [])):
            flight.compute.wait_event(flight.done)
        parcel.incoming.clear()
        parcel.outgoing = None

    def far_bytes(self) -> tuple[int, int]:
        """Bytes held now and at most."""
        self._collect()
        return self._used_bytes, self._peak_bytes

    def _copy(
        self,
        slot: _PinnedSlot,
        target: Tensor,
        source: Tensor,
        held: Tensor,
        stream: torch.cuda.Stream,
        compute: torch.cuda.Stream,
    ) -> _Flight:
        if slot.last is not None:
            stream.wait_event(slot.last)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            slot.last = stream.record_event()
        return _Flight(held, slot.last, compute)

    def _take(self, nbytes: int) -> _PinnedSlot:
        self._collect()
        waiting = self._free.get(nbytes)
        if waiting:
            slot = waiting.pop()
            self._free_bytes -= nbytes
        else:
            self._make_room(nbytes)
            slot = _PinnedSlot(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.settings.pin))
        self._used_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return slot

    def _make_room(self, nbytes: int) -> None:
        check_budget(self.settings, nbytes, self._used_bytes)
        budget = self.settings.budget
        while budget is not None and self._used_bytes + self._free_bytes + nbytes > budget:
            size = next(size for size, slots in self._free.items() if slots)
            _let_go(self._free[size].pop())
            self._free_bytes -= size

    def _collect(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            nbytes = slot.memory.numel()
            self._used_bytes -= nbytes
            if not self.settings.keep:
                _let_go(slot)
                continue
            self._free.setdefault(nbytes, []).append(slot)
            self._free_bytes += nbytes


def _let_go(slot: _PinnedSlot) -> None:
    """Wait for the last copy that touches ``slot``: its memory must not go back to the system under it."""
    if slot.last is not None:
        slot.last.synchronize()


def _bytes_of(tensor: Tensor, parcel: Parcel) -> Tensor:
    """The memory of ``tensor`` from its first byte to its last."""
    start = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, (parcel.layout.nbytes,), (1,))
