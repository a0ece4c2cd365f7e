"""The report of a compiled step, with the measured peak on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt.execute.executable import Executable
from graphopt.execute.measure import MemoryTrace, measure_memory
from graphopt.execute.state_rows import StateRow
from graphopt.ir.numeric import random_inputs
from graphopt.ir.units import format_bytes, format_seconds
from graphopt.report.build import build_report
from graphopt.report.data import Report
from graphopt.report.state import state_notes


def step_report(
    executable: Executable,
    options: Any,
    *,
    measure: bool,
    notes: Sequence[str] = (),
    state: Sequence[StateRow] = (),
) -> Report:
    """The Report of ``executable``; ``measure``: run it once on random numbers of the same shapes.

    Measuring allocates a second set of inputs (parameters, state, batch); the real ones are not touched.
    """
    return build_report(
        executable,
        measured=measure_executable(executable) if measure else None,
        notes=(*notes, *offload_notes(executable), *state_notes(state)),
        state=state,
    )


def measure_executable(executable: Executable) -> MemoryTrace:
    """The memory of one run on random inputs, as the allocator saw it."""
    inputs = random_inputs(executable.program)
    device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), None)

    def run() -> Any:
        with torch.no_grad():
            return executable.run(inputs)

    with torch.random.fork_rng():  # outside of what is measured: it copies the generator's state
        return measure_memory(run, device=device)


def offload_notes(executable: Executable) -> tuple[str, ...]:
    """What the executable has moved to far memory and back so far, as one line; nothing where it does not offload."""
    if executable.offload is None:
        return ()
    moved = executable.offload.statistics
    return (
        f"offload: {moved.values_out} values ({format_bytes(moved.bytes_out)}) out and {moved.values_in} "
        f"({format_bytes(moved.bytes_in)}) in so far, waited {format_seconds(moved.wait_seconds)}, far memory at most "
        f"{format_bytes(moved.far_peak_bytes)}",
    )
