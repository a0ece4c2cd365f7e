"""Whose state is paged, and the pages of each: what a step keeps of optimizer state in far memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphopt.capture.page_layout import PageLayout
from graphopt.errors import StateError, UnsupportedError
from graphopt.execute.cpu_copier import CopyPace, CpuCopier
from graphopt.execute.paging.page_memory import PageMemory, new_page_memory
from graphopt.execute.paging.ranges import new_copier
from graphopt.execute.parcel import Copier, Meter
from graphopt.ir.units import format_bytes, format_seconds
from graphopt.kernels.flat_tensors import is_dense
from graphopt.optim.base import Optimizer, checked_page_limit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PagingStatistics:
    """``paged``, ``kept``: parameters whose state lies in far memory, or stays in ordinary memory because of the limit.

    ``kept_bytes``: of state that stays, at most ``limit_bytes``; ``paged_bytes``: of state in far memory, of which
    ``resident_bytes`` are in ordinary memory at this moment (None: the system does not tell); ``bytes_in``,
    ``bytes_out``: moved so far; ``wait_seconds``: how long updates waited for that.
    """

    paged: tuple[str, ...]
    kept: tuple[str, ...]
    limit_bytes: int
    kept_bytes: int
    paged_bytes: int
    resident_bytes: int | None
    bytes_in: int
    bytes_out: int
    wait_seconds: float


@dataclass(frozen=True)
class PagedState:
    """The pages of one parameter, and the state tensors in them by name."""

    memory: PageMemory
    layout: PageLayout
    tensors: Mapping[str, Tensor]


class PageStore:
    """Decides once for each parameter whether its state is paged, and holds the pages.

    The limit goes to the smallest states first: each byte kept saves the same traffic, but a small state costs a copy
    of its own all the same. What does not fit is paged.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_on = optimizer.paged
        self.limit = checked_page_limit(optimizer.page_limit)
        self.folder = optimizer.page_dir
        self.meter = Meter()
        self._kept: dict[str, int] = {}
        self._paged: dict[str, PagedState | None] = {}
        self._copiers: dict[torch.device, Copier] = {}
        self._warned = False

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a step with paged state cannot be copied or pickled: its state lies in a map of this process. Compile "
            "another step, and give it state_dict()"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()

    # ---- who -----------------------------------------------------------------------------------------------------

    def is_paged(self, name: str) -> bool:
        """Whether the state of ``name`` lies in far memory; decided before."""
        return name in self._paged

    def undecided(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """The names for which ``decide`` is still to be called; none where nothing is paged."""
        if not self.is_on:
            return ()
        return tuple(name for name in parameters if name not in self._kept and name not in self._paged)

    def decide(self, sizes: Mapping[str, int], parameters: Mapping[str, Tensor]) -> None:
        """Decide for the parameters in ``sizes``, bytes of state by name."""
        left = self.limit - sum(self._kept.values())
        for name, nbytes in sorted(sizes.items(), key=lambda item: item[1]):
            parameter = parameters[name]
            can_be_paged = nbytes and parameter.device.type in ("cpu", "cuda") and is_dense(parameter)
            if nbytes <= left or not can_be_paged:
                self._kept[name] = nbytes
                left -= nbytes
            else:
                self._paged[name] = None

    def pages_of(self, name: str) -> Tensor:
        """The pages of ``name``; StateError where it has none."""
        found = self._paged.get(name)
        if found is None:
            raise StateError(f"the state of {name!r} is not paged; paged are {list(self._paged)}")
        return found.memory.pages

    # ---- what ----------------------------------------------------------------------------------------------------

    def page_in(
        self,
        name: str,
        layout: PageLayout,
        parameter: Tensor,
        state: dict[str, Any],
        initial: Callable[[str, Tensor], None],
    ) -> Tensor:
        """The pages of ``name``; its tensors in ``state`` are now those in the pages, with the values they had.

        ``initial(slot, tensor)`` fills those that ``state`` does not have. What belongs to no slot stays as it is.
        """
        found = self.reserve(name, layout, parameter)
        if all(state.get(slot) is tensor for slot, tensor in found.tensors.items()):
            return found.memory.pages
        for slot, tensor in found.tensors.items():
            if slot in state:
                tensor.copy_(state[slot])
            else:
                initial(slot, tensor)
            state[slot] = tensor
            found.memory.evict()
        return found.memory.pages

    def reserve(self, name: str, layout: PageLayout, parameter: Tensor) -> PagedState:
        """Far memory for the state of ``name``: what it has, if that is laid out so, or new. What was in other memory
        stays there for whoever holds its tensors.
        """
        found = self._paged.get(name)
        if found is None or found.layout != layout:
            found = self._paged[name] = self._new(layout, parameter)
        found.memory.check_process()
        return found

    def _new(self, layout: PageLayout, parameter: Tensor) -> PagedState:
        device = parameter.device
        if device not in self._copiers:
            self._copiers[device] = new_copier(device)
        memory = new_page_memory(
            layout.nbytes, device, folder=self.folder, copier=self._copiers[device], meter=self.meter
        )
        if memory.is_map:
            self._warn_once()
        return PagedState(memory, layout, _tensors(memory.pages, layout, parameter))

    def _warn_once(self) -> None:
        if self._warned:
            return
        self._warned = True
        log.warning(
            "paged=True on the CPU: optimizer state lies in memory-mapped files (%s). That saves ordinary memory and "
            "costs reading and writing all of it at every update; page_dir= says where, page_limit= how much stays",
            self.folder or "in the folder for temporary files",
        )

    def set_pace(self, pace: CopyPace) -> None:
        """Slow CPU copies down from now on; for tests of what depends on their order."""
        for copier in self._copiers.values():
            if isinstance(copier, CpuCopier):
                copier.set_pace(pace)

    def settle(self) -> None:
        """Return when all that was written to page-locked memory can be read by the host."""
        for device in self._copiers:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    # ---- looking inside ------------------------------------------------------------------------------------------

    def statistics(self) -> PagingStatistics:
        """What is paged now, and what has been moved so far."""
        there = {name: found for name, found in self._paged.items() if found is not None}
        resident = [found.memory.resident_bytes() for found in there.values()]
        return PagingStatistics(
            paged=tuple(there),
            kept=tuple(self._kept),
            limit_bytes=self.limit,
            kept_bytes=sum(self._kept.values()),
            paged_bytes=sum(found.layout.nbytes for found in there.values()),
            resident_bytes=None if None in resident else sum(nbytes or 0 for nbytes in resident),
            bytes_in=self.meter.bytes_in,
            bytes_out=self.meter.bytes_out,
            wait_seconds=self.meter.wait_seconds,
        )

    def notes(self) -> tuple[str, ...]:
        """What a report says; nothing where nothing is paged."""
        if not self.is_on:
            return ()
        now = self.statistics()
        is_map = any(found is not None and found.memory.is_map for found in self._paged.values())
        resident = "unknown" if now.resident_bytes is None else format_bytes(now.resident_bytes)
        return (
            f"paged state: {format_bytes(now.paged_bytes)} of {len(now.paged)} parameters in "
            f"{'memory-mapped files' if is_map else 'page-locked memory of the host'} ({resident} of it in ordinary "
            f"memory now); {format_bytes(now.kept_bytes)} of {len(now.kept)} stay, of at most "
            f"{format_bytes(now.limit_bytes)}",
            f"paged state moved so far: {format_bytes(now.bytes_in)} in, {format_bytes(now.bytes_out)} out, waited "
            f"{format_seconds(now.wait_seconds)}",
        )


def _tensors(pages: Tensor, layout: PageLayout, parameter: Tensor) -> dict[str, Tensor]:
    """Views of ``pages``: one element for each of the parameter's in its layout, or one a block in a row."""
    found = {}
    for slot in layout.slots:
        tensor = pages[slot.start : slot.start + slot.nbytes].view(slot.dtype)
        if not slot.is_by_blocks:
            tensor = tensor.as_strided(parameter.shape, parameter.stride())
        found[slot.name] = tensor
    return found
