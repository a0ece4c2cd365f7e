"""Another function in the place of one of torch's own, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced_function(module: ModuleType, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``module`` calls ``make(original)`` by ``name``; where it has no such function, nothing is replaced."""
    functions = vars(module)
    original = functions.get(name)
    if original is None:
        yield
        return
    functions[name] = make(original)
    try:
        yield
    finally:
        functions[name] = original
