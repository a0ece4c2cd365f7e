"""Decomposing a program lists torch's operators once, not once for each of their namespaces.

``ExportedProgram.run_decompositions`` asks for the composite operators of 27 namespaces and, for each, looks all of
torch's C++ operators up again. Nothing registers operators in between, so one time is enough: a tenth of the time that
the first step of a small model takes. Where torch has no function of that name, it lists them as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch._export.utils

from graphopt.capture.replaced_function import replaced_function

_NAME = "_materialize_cpp_cia_ops"


def operators_listed_once() -> AbstractContextManager[None]:
    """Inside, C++ operators are looked up at the first call alone. No operator may be registered inside."""
    return replaced_function(torch._export.utils, _NAME, _listed_now)


def _listed_now(list_all: Callable[[], None]) -> Callable[[], None]:
    list_all()
    return _nothing


def _nothing() -> None:
    """The operators are there."""
