"""A GPU that is pretended: tensors on "cuda" in the host's memory, Triton's kernels in its interpreter.

For programs of their own: ``pretend_a_gpu(library, capability)`` comes before torch and Triton are imported, and nothing
is undone. See ``pretended_gpu.cpp`` for operators.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
_NUM_MULTIPROCESSORS = 4


def build_library(folder: Path) -> Path:
    """The compiled ``pretended_gpu.cpp``, in ``folder``."""
    import torch

    package, library = Path(torch.__file__).parent, folder / "pretended_gpu.so"
    include = [f"-I{package / 'include'}", f"-I{package / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{package / 'lib'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", abi, *include, str(SOURCE), "-o", str(library), *linked]
    subprocess.run(command, check=True, timeout=300)
    return library


def pretend_a_gpu(library: Path, capability: tuple[int, int]) -> Callable[[], int]:
    """From here on there is a GPU of ``capability``; gives a function that counts what the host has read from it."""
    os.environ["TRITON_INTERPRET"] = "1"
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # first: torch asks once whether there is CUDA
    loaded.pretended_gpu_host_reads.restype = ctypes.c_int64
    _answer_for_cuda(capability)
    copied = _interpret_as_hardware_rounds(loaded.pretended_gpu_host_reads)
    return lambda: loaded.pretended_gpu_host_reads() - copied[0]


class _Event:
    """Of a clock in which everything takes equally long: the first implementation of an FP8 product is chosen."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 1.0


def _answer_for_cuda(capability: tuple[int, int]) -> None:
    import torch

    major, minor = capability
    properties = SimpleNamespace(
        name="NVIDIA pretended", major=major, minor=minor, multi_processor_count=_NUM_MULTIPROCESSORS
    )
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "device": lambda device=None: nullcontext(),
        "Event": _Event,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _interpret_as_hardware_rounds(host_reads: Callable[[], int]) -> list[int]:
    """Let Triton's interpreter round to nearest even, saturating in FP8, as ``cvt`` does; how often it has copied."""
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    convert, run = interpreter._convert_float, interpreter.InterpretedFunction.run
    kinds = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    copied = [0]

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in kinds:
            return convert(values, source, target, mode)
        kind = kinds[target]
        wide = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.float32).copy())
        if kind.itemsize == 1:
            wide = wide.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
        words = wide.to(kind).view(torch.uint8 if kind.itemsize == 1 else torch.uint16)
        if kind.itemsize == 1:
            words[wide.isnan()] = 0x7F
        return words.numpy().reshape(values.shape)

    def run_uncounted(self: Any, *arguments: Any, **named: Any) -> Any:
        before = host_reads()
        try:
            return run(self, *arguments, **named)
        finally:
            copied[0] += host_reads() - before

    interpreter._convert_float, interpreter.InterpretedFunction.run = rounded, run_uncounted
    return copied
