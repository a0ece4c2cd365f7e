"""Where and when a row was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from graphopt.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
# Rows that an earlier benchmark has just written do not change what is measured.
_NOT_RESULTS = ":(exclude)benchmarks/results"
_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The facts that a figure depends on. ``commit`` is None outside a git checkout; ``dirty``: it had changes; ``gpu``
    and ``triton`` are None where there is none, or where the row is of before they were noted."""

    cpu: str
    num_cores: int
    num_threads: int
    torch: str
    transformers: str
    python: str
    os: str
    graphopt: str
    commit: str | None
    dirty: bool
    date: str
    gpu: str | None = None
    triton: str | None = None


def this_machine() -> Machine:
    """The Machine this process runs on, now."""
    return Machine(
        cpu=_cpu_model(),
        num_cores=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=_version_of("transformers") or "none",
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        graphopt=__version__,
        commit=_git("rev-parse", "HEAD"),
        dirty=bool(_git("status", "--porcelain", "--", ".", _NOT_RESULTS)),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        gpu=_gpu(),
        triton=_version_of("triton"),
    )


def _cpu_model() -> str:
    if _CPU_FACTS.exists():
        for line in _CPU_FACTS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor}, CUDA {torch.version.cuda})"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    # Without optional locks even ``status`` leaves the index alone.
    command = ["git", "--no-optional-locks", "-C", str(REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
