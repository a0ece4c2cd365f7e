"""Counts the bytes that interpreted Triton kernels move; Triton must have been imported with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

# Where a method's mask stands among its arguments; the pointers come first, or after the kind of an atomic operation.
COUNTED = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}


@dataclass
class Moved:
    num_bytes: int = 0

    def count(self, pointers: Any, mask: Any) -> None:
        self.num_bytes += int(np.sum(mask.data)) * pointers.get_element_ty().primitive_bitwidth // 8


@contextmanager
def counted_bytes() -> Iterator[Moved]:
    """The bytes that all loads, stores and atomic operations of the kernels run inside touch, as often as they do."""
    moved = Moved()
    originals = {name: getattr(InterpreterBuilder, name) for name in COUNTED}
    for name, original in originals.items():
        setattr(InterpreterBuilder, name, _counting(moved, original, *COUNTED[name]))
    try:
        yield moved
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)


def _counting(moved: Moved, original: Any, pointers_at: int, mask_at: int) -> Any:
    def counting(self: Any, *arguments: Any) -> Any:
        moved.count(arguments[pointers_at], arguments[mask_at])
        return original(self, *arguments)

    return counting
