"""What every process of tests does first: one thread each, and collections that pass over what was imported."""

from __future__ import annotations

import gc
import importlib
import os
import sys

import pytest

# pytest-xdist names its workers so; a worker reads this file before anything imports torch, which reads the variable
# once. Programs that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What torch imports when it first exports or compiles.
_IMPORTED_LATE = ("torch._dynamo", "torch._inductor.compile_fx")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the half million objects of imported modules: they live as long as the process.

    Every build collects garbage, and looking through them takes a third of a second each time: half of the time of
    tests of small steps, a quarter where models are larger. Objects that tests make are collected as ever.
    """
    if "graphopt" not in sys.modules or session.config.option.collectonly:
        return
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter's end find all objects: bindings complain of those that it leaves behind."""
    gc.unfreeze()
