"""Which backend runs a step, and why: ATen operators one by one, or regions compiled by Inductor."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from graphopt.errors import UnsupportedError
from graphopt.execute.region_estimate import estimate_regions
from graphopt.ir.program import Program
from graphopt.ir.storage import tensors_in

STEPS_TO_REPAY = 1000
"""Steps within which compiling should have paid for itself."""


@dataclass(frozen=True)
class Backend:
    """``name``: "aten" or "inductor"; ``reason``: why; ``notes``: what else a report should say about it."""

    name: str
    reason: str
    notes: tuple[str, ...] = ()


ATEN = Backend("aten", "asked for")


def choose_backend(asked: str, program: Program) -> Backend:
    """The backend for ``program`` (functional) when "aten", "inductor" or "auto" was ``asked`` for.

    Raises UnsupportedError when Inductor is asked for and cannot compile here.
    """
    if asked == "aten":
        return ATEN
    missing = missing_tools(program)
    if asked == "inductor":
        if missing is not None:
            raise UnsupportedError(f"backend='inductor' expected {missing}, or use backend='aten'")
        return Backend("inductor", "asked for")
    if missing is not None:
        return Backend("aten", f"auto: Inductor expected {missing}")
    estimate = estimate_regions(program)
    saved, costs = estimate.saved_seconds, estimate.compile_seconds
    figures = f"about {1e3 * saved:.2g} ms a step for about {costs:.0f} s of compilation"
    if saved * STEPS_TO_REPAY >= costs and estimate.num_regions:
        return Backend("inductor", f"auto: saves {figures}")
    return Backend("aten", f"auto: too small to repay Inductor within {STEPS_TO_REPAY} steps ({figures})")


def missing_tools(program: Program) -> str | None:
    """What Inductor needs and does not find, with what to do about it; None when it has all."""
    kinds = {tensor.device.type for node in program.graph.nodes for tensor in tensors_in(node.meta.get("val"))}
    if (not torch.version.cuda and "cuda" in kinds) or (kinds - {"cpu", "cuda"}):
        return f"tensors on a CPU or a CUDA device, came {', '.join(sorted(kinds))}; use another device"
    if "cuda" in kinds and importlib.util.find_spec("triton") is None:
        return "Triton for the CUDA device, found none; install triton"
    return _missing_compiler()


def _missing_compiler() -> str | None:
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0] if compiler.strip() else "") is None:
        return f"a C++ compiler, found no {compiler!r}; install g++ (or set CXX to a compiler that is there)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the headers of Python, found no Python.h; install Python's development files (python3-dev)"
    return None
