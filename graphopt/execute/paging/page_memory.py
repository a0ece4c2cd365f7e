"""The far memory of one parameter's state: a memory-mapped file on the CPU, page-locked memory beside a CUDA device.

The file is made new (O_EXCL) in a private folder, takes its whole size on the disk at once, and loses its name as soon
as it is mapped: nothing else can open it, and nothing is left behind however the process ends. No handle stays open.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphopt.errors import StateError
from graphopt.execute.parcel import Copier, Meter
from graphopt.ir.units import format_bytes

_MAPS = Path("/proc/self/smaps")


@dataclass(eq=False)
class PageMemory:
    """``pages``: u8[bytes] in far memory; ``copier`` moves ranges of it, ``meter`` counts them; ``is_map``: whether it
    is a map of a file; ``process``: whose it is.
    """

    pages: Tensor
    copier: Copier
    meter: Meter
    is_map: bool
    process: int = field(default_factory=os.getpid)

    def check_process(self) -> None:
        """Raise StateError in a forked process: both would write into one map."""
        if os.getpid() != self.process:
            raise StateError(
                "this paged state belongs to the process from which this one was forked, and both would write into "
                "it: compile and load the state in the process that trains"
            )

    def evict(self, start: int = 0, stop: int | None = None) -> None:
        """Give the memory of bytes ``start`` to ``stop``, whole pages of the system in them, back to it. The content
        stays in the file. Nothing happens to page-locked memory.
        """
        if not self.is_map:
            return
        page = mmap.PAGESIZE
        stop = self.pages.numel() if stop is None else stop
        # The map begins at a page, and its last page is its own to the end.
        first = -(-start // page) * page
        last = -(-stop // page) * page if stop == self.pages.numel() else stop // page * page
        advise = _madvise()
        if advise is not None and first < last:
            advise(self.pages.data_ptr() + first, last - first)

    def resident_bytes(self) -> int | None:
        """Bytes that are in ordinary memory now; None where the system does not tell."""
        if not self.is_map:
            return 0
        return _mapped_bytes(self.pages.data_ptr())


_KNOWN: weakref.WeakValueDictionary[int, PageMemory] = weakref.WeakValueDictionary()


def known_memory(pages: Tensor) -> PageMemory | None:
    """The PageMemory whose content ``pages`` is; None for any other tensor (a trial's, a copy)."""
    memory = _KNOWN.get(pages.data_ptr())
    return memory if memory is not None and memory.pages.numel() == pages.numel() else None


def new_page_memory(
    nbytes: int, device: torch.device, *, folder: str | None, copier: Copier, meter: Meter
) -> PageMemory:
    """``nbytes`` of zeros in far memory of ``device``. Raises StateError where there is no room."""
    is_map = device.type == "cpu"
    pages = _mapped_file(nbytes, folder) if is_map else torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = PageMemory(pages, copier, meter, is_map)
    _KNOWN[pages.data_ptr()] = memory
    return memory


def _mapped_file(nbytes: int, folder: str | None) -> Tensor:
    where = folder or tempfile.gettempdir()
    try:
        private = Path(tempfile.mkdtemp(prefix="graphopt-pages-", dir=where))
    except OSError as error:
        raise _no_room(nbytes, where, error) from error
    path = private / "pages"
    try:
        _reserve(path, nbytes)
        return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
    except OSError as error:
        raise _no_room(nbytes, where, error) from error
    finally:
        path.unlink(missing_ok=True)
        private.rmdir()


def _reserve(path: Path, nbytes: int) -> None:
    """Make the file with all its blocks: a map of a file with holes ends the process when the disk is full."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, nbytes)
        else:
            _write_zeros(handle, nbytes)
    finally:
        os.close(handle)


def _write_zeros(handle: int, nbytes: int) -> None:
    chunk = bytes(1 << 20)
    while nbytes:
        nbytes -= os.write(handle, chunk[:nbytes])


def _no_room(nbytes: int, where: str, error: OSError) -> StateError:
    return StateError(
        f"paged state needs a file of {format_bytes(nbytes)} in {where!r}, which the system refused "
        f"({error.strerror}); nothing has been changed: make room, or give another folder with page_dir="
    )


@functools.cache
def _madvise() -> Callable[[int, int], int] | None:
    """Lets go of mapped memory, on Linux, whose meaning of the advice is relied on."""
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, nbytes: int(call(address, nbytes, mmap.MADV_DONTNEED))


def _mapped_bytes(address: int) -> int | None:
    """What the system says is resident of the map that begins at ``address``."""
    if not _MAPS.is_file():
        return None
    found = False
    for line in _MAPS.read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            first, _, last = head.partition("-")
            found = int(first, 16) <= address < int(last, 16)
        elif found and head == "Rss:":
            return int(line.split()[1]) * 1024
    return None
