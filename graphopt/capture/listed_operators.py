"""Decomposing a program lists torch's operators once, not once for each of their namespaces.

``ExportedProgram.run_decompositions`` asks for the composite operators of 27 namespaces and, for each, looks all of
torch's C++ operators up again. Nothing registers operators in between, so one time is enough: a tenth of the time that
the first step of a small model takes. Where torch has no function of that name, it lists them as it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._export.utils

_NAME = "_materialize_cpp_cia_ops"


@contextmanager
def operators_listed_once() -> Iterator[None]:
    """Inside, C++ operators are looked up at the first call alone. No operator may be registered inside."""
    functions = vars(torch._export.utils)
    original = functions.get(_NAME)
    if original is None:
        yield
        return
    original()
    functions[_NAME] = _nothing
    try:
        yield
    finally:
        functions[_NAME] = original


def _nothing() -> None:
    """The operators are there."""
