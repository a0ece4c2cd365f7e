"""Launching Triton kernels as on a GPU that is not there: everything is compiled, nothing runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget


@dataclass
class CompilingOnly:
    """Takes the place of a kernel: a launch asks Triton for the compiled kernel as a GPU would, and runs nothing."""

    kernel: Any
    grids: list[tuple[int, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **named: self.kernel.run(*arguments, grid=grid, warmup=True, **named)

    @property
    def num_compiled(self) -> int:
        return sum(len(caches[0]) for caches in self.kernel.device_caches.values())


def absent_driver(arch: int) -> SimpleNamespace:
    """What Triton asks a driver when it compiles for sm_``arch``."""
    target = GPUTarget("cuda", arch, 32)
    return SimpleNamespace(
        get_current_device=lambda: "absent", get_current_stream=lambda _: 0, get_current_target=lambda: target
    )


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on there is an H100 as far as compiling is concerned."""
    monkeypatch.setattr(triton.runtime.driver, "_active", absent_driver(90))
