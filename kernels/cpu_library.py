"""The compiled CPU kernels: built from ``cpu_source/`` at first use by the system's C++ compiler, and kept.

``library()`` gives the loaded library, or None where the plain torch form has to do: no compiler, one that fails, or
``GRAPHOPT_NO_CXX=1``. ``cpu_path()`` says in words which it is and why. Importing this module builds nothing.

The file in the cache is named by a hash of the sources, the flags, the compiler and the processor, so that one folder
may serve several machines; it is written under another name and renamed, so that processes may build at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu_source"
MAIN_SOURCE = "block_update.cpp"
DISABLE = "GRAPHOPT_NO_CXX"
CACHE = "GRAPHOPT_CACHE"
# What lets loops become vector code without changing a bit: no math function reports through errno, no operation traps.
# Contraction to fused multiply-adds would change bits, and is off.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno",
    "-fno-trapping-math", "-fPIC",
)  # fmt: skip
# The sources build in two seconds; this bounds a compiler that hangs.
MOST_SECONDS_TO_BUILD = 300

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """The outcome of an attempt: a library, or None; and why, in words."""

    library: ctypes.CDLL | None
    reason: str


def library() -> ctypes.CDLL | None:
    """The compiled kernels, built at the first call of a process if the cache has none; None: use plain torch."""
    return None if _is_disabled() else _of_this_process().library


def cpu_path() -> str:
    """Which form of the CPU kernels is in use, and why; builds them if that was not tried yet."""
    if _is_disabled():
        return f"plain torch: {DISABLE} is set"
    return _of_this_process().reason


def compilers() -> tuple[str, ...]:
    """Commands to try, best first: ``$CXX`` (with its arguments), then the system's."""
    named = os.environ.get("CXX")
    return (named,) if named else ("c++", "g++", "clang++")


def cache_folder() -> Path:
    """Where built libraries are kept: ``$GRAPHOPT_CACHE``, or ``graphopt`` in the user's cache folder."""
    if named := os.environ.get(CACHE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphopt"


def _is_disabled() -> bool:
    return os.environ.get(DISABLE, "0") not in ("", "0")


@cache
def _of_this_process() -> Built:
    return build()


def build() -> Built:
    """Loads the library from the cache, or builds it into it. ``library()`` asks once and keeps the answer."""
    compiler = next((words for name in compilers() if (words := _command(name))), None)
    if compiler is None:
        return _plain(f"no C++ compiler found (looked for {', '.join(compilers())}; $CXX names another)")
    try:
        version = _output([*compiler, "--version"]).splitlines()[0]
        path = _cached(compiler, version)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return _plain(f"{compiler[0]} did not build the kernels: {_described(error)}")
    return Built(loaded, f"compiled ({version})")


def _plain(reason: str) -> Built:
    log.warning("block-INT8 updates and FP8 casts on the CPU run in plain torch, 3 to 30 times slower: %s", reason)
    return Built(None, f"plain torch: {reason}")


def _command(name: str) -> list[str] | None:
    """The words of a compiler command whose program exists."""
    words = name.split()
    return words if words and shutil.which(words[0]) else None


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=MOST_SECONDS_TO_BUILD)
    return done.stdout


def _described(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    errors = [line for line in lines if "error" in line] or lines
    return errors[0] if errors else str(error)


def _cached(compiler: list[str], version: str) -> Path:
    """The built library: from the cache, or built into it; in a new folder where the cache is not writable."""
    name = f"block-update-{_fingerprint(compiler, version)}.so"
    folder = cache_folder()
    if (folder / name).is_file():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _build(compiler, folder, name)
    except PermissionError as error:
        log.warning("no cache for compiled kernels, they are built in each process: %s", error)
        return _build(compiler, Path(tempfile.mkdtemp(prefix="graphopt-")), name)


def _build(compiler: list[str], folder: Path, name: str) -> Path:
    handle, unfinished = tempfile.mkstemp(dir=folder, prefix=name, suffix=".unfinished")
    os.close(handle)
    object_file = unfinished + ".o"
    try:
        _output([*compiler, *FLAGS, "-c", str(SOURCES / MAIN_SOURCE), "-o", object_file])
        _output([*compiler, "-shared", *_openmp_to_link(), object_file, "-o", unfinished])
        Path(unfinished).replace(folder / name)
    finally:
        Path(object_file).unlink(missing_ok=True)
        Path(unfinished).unlink(missing_ok=True)
    return folder / name


def _openmp_to_link() -> tuple[str, ...]:
    """Nothing where torch has loaded GCC's OpenMP for all to see: a second copy would keep threads of its own."""
    return () if hasattr(ctypes.CDLL(None), "GOMP_parallel") else ("-fopenmp",)


def _fingerprint(compiler: list[str], version: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    for text in (*compiler, version, *FLAGS, *_openmp_to_link(), _processor()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What ``-march=native`` depends on: the processor's instruction sets where the system lists them."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return f"{platform.machine()} {platform.processor()}"
    lines = listing.read_text(errors="replace").splitlines()
    wanted = ("flags", "Features", "model name", "cpu family", "model\t", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
