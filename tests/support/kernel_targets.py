"""Kernels compiled for GPUs that are not there: what they came to, in instructions and bytes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphopt.kernels.launch_triton import Tiling, launch_options

# A load or store of global memory that no mask guards: ``ld.global.v4.b32`` gives ("ld", "v4.b32").
UNGUARDED = re.compile(r"^\s*(ld|st)\.global(?:\.\w+::\w+)*\.((?:v\d\.)?b\d+)", re.MULTILINE)
# The same, behind a mask or not.
GLOBAL = re.compile(r"\b(ld|st)\.global(?:\.\w+::\w+)*\.((?:v\d\.)?b\d+)")


@dataclass(frozen=True)
class Compiled:
    """PTX of a kernel. ``stack_bytes`` and ``local_bytes`` of a thread hold what its registers cannot."""

    ptx: str
    registers: int
    stack_bytes: int
    local_bytes: int

    def unguarded(self, operation: str) -> Counter[str]:
        """How often each width is loaded ("ld") or stored ("st") without a mask."""
        return Counter(width for found, width in UNGUARDED.findall(self.ptx) if found == operation)

    def moved(self, operation: str) -> Counter[str]:
        """How often each width is loaded or stored, behind a mask or not."""
        return Counter(width for found, width in GLOBAL.findall(self.ptx) if found == operation)


def compile_for(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], tiling: Tiling, arch: int
) -> Compiled:
    """``kernel`` for sm_``arch`` with the options of a launch; Triton keeps the result in its cache."""
    return compiled_with(kernel, signature, constants, launch_options(tiling), arch)


def compiled_with(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any],
    arch: int,
    *,
    multiples_of_16: Collection[str] = (),
) -> Compiled:
    """``kernel`` for sm_``arch``; a launch finds by itself which arguments are ``multiples_of_16``."""
    names = kernel.arg_names
    types = signature | dict.fromkeys(constants, "constexpr")
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples_of_16}
    source = ASTSource(fn=kernel, signature={name: types[name] for name in names}, constexprs=constants, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Compiled(compiled.asm["ptx"], *resources(compiled.asm["cubin"]))


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack and bytes of local memory of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    assert found, f"no resources in the answer of cuobjdump: {done.stdout}"
    return int(found[1]), int(found[2]), int(found[3])
