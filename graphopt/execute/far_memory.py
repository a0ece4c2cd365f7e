"""Far memory on the CPU: maps that torch's allocator does not count, pooled by size, with a limit in bytes."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

from graphopt.errors import OffloadError
from graphopt.ir.units import format_bytes


@dataclass(frozen=True)
class FarMemory:
    """``budget``: most bytes of far memory, None for no limit. ``pin``: page-locked memory (CUDA only). ``keep``: hold
    memory that was given back for the next step.
    """

    budget: int | None = None
    pin: bool = True
    keep: bool = True

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise OffloadError(f"the host budget expects at least 0 bytes, came {self.budget}")


@dataclass(frozen=True)
class FarSlot:
    """``nbytes`` of far memory at ``address``; ``memory``, a map or a tensor, lives as long as the slot."""

    nbytes: int
    address: int
    memory: object


class FarPool:
    """Slots by size, used again from step to step. Touched by one thread alone; others may read the counts."""

    def __init__(self, settings: FarMemory) -> None:
        self.settings = settings
        self.free: dict[int, list[FarSlot]] = {}
        self.used_bytes = 0
        self.free_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> FarSlot:
        """A slot of ``nbytes``; OffloadError where the budget does not hold it."""
        waiting = self.free.get(nbytes)
        if waiting:
            slot = waiting.pop()
            self.free_bytes -= nbytes
        else:
            self._make_room(nbytes)
            slot = _new_slot(nbytes)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return slot

    def give_back(self, slot: FarSlot) -> None:
        """``slot`` may be taken again, or is forgotten where nothing is kept."""
        self.used_bytes -= slot.nbytes
        if self.settings.keep:
            self.free.setdefault(slot.nbytes, []).append(slot)
            self.free_bytes += slot.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Forget free slots of other sizes until ``nbytes`` more are within the budget."""
        check_budget(self.settings, nbytes, self.used_bytes)
        budget = self.settings.budget
        while budget is not None and self.used_bytes + self.free_bytes + nbytes > budget:
            size = next(size for size, slots in self.free.items() if slots)
            self.free[size].pop()
            self.free_bytes -= size


def check_budget(settings: FarMemory, nbytes: int, used_bytes: int) -> None:
    """Raise OffloadError unless ``nbytes`` more than ``used_bytes`` are within the budget."""
    if settings.budget is not None and used_bytes + nbytes > settings.budget:
        raise OffloadError(
            f"far memory is limited to {format_bytes(settings.budget)} and holds {format_bytes(used_bytes)}; a value "
            f"of {format_bytes(nbytes)} does not fit: raise host_budget, or offload less"
        )


def _new_slot(nbytes: int) -> FarSlot:
    memory = mmap.mmap(-1, max(nbytes, 1))  # a map cannot be empty
    return FarSlot(nbytes, ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory)
