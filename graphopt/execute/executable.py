"""A Program that runs: emitted source, compiled, and called segment by segment."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.execute.backend import ATEN, Backend
from graphopt.execute.emit import emit_source, produced_outputs, rename_reserved
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.offload import OffloadEngine
from graphopt.execute.region_workspace import RegionWorkspace
from graphopt.execute.segments import Segment, split_segments
from graphopt.ir import ops
from graphopt.ir.liveness import MemoryPlan, plan_memory
from graphopt.ir.program import Program

_COUNTER = itertools.count()


@dataclass(frozen=True)
class CompiledSegment:
    """One emitted function and the positions of the outputs it returns."""

    name: str
    function: Callable[[Sequence[Any], list[Any]], tuple[tuple[Any, ...], list[Any]]]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Executable:
    """An emitted Program: its source, its plan and its segments in order; ``offload`` is the engine that moves values
    to far memory and back, where the program does so.
    """

    program: Program
    plan: MemoryPlan
    source: str
    segments: tuple[CompiledSegment, ...]
    offload: OffloadEngine | None = None
    backend: Backend = ATEN

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """All outputs by position; None for updates, which have been written, except those written at the end."""
        outputs: list[Any] = [None] * len(self.program.signature.outputs)
        carried: list[Any] = []
        for segment in self.segments:
            carried = run_segment(segment, inputs, carried, outputs)
        return outputs


def run_segment(segment: CompiledSegment, inputs: Sequence[Any], carried: list[Any], outputs: list[Any]) -> list[Any]:
    """Run one segment, put its results into ``outputs``, return what it carries on."""
    results, carried = segment.function(inputs, carried)
    for position, value in zip(segment.outputs, results, strict=True):
        outputs[position] = value
    return carried


def run_before_commit(executable: Executable, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """Run all segments but the last, which alone writes parameters and state; returns what they carry on to it."""
    carried: list[Any] = []
    for segment in executable.segments[:-1]:
        carried = run_segment(segment, inputs, carried, outputs)
    return carried


def build_executable(
    program: Program, *, title: str, far_memory: FarMemory | None = None, backend: Backend = ATEN
) -> Executable:
    """Plan, emit and compile ``program``; what it offloads goes to ``far_memory``."""
    program = program.copy()
    rename_reserved(program)
    program.finish()
    workspace = RegionWorkspace()
    workspace.learn(program)
    plan = plan_memory(program, workspace=workspace)
    source = emit_source(program, plan, title=title)
    # The counter keeps sources of equal titles apart in tracebacks.
    filename = f"<graphopt {title} {next(_COUNTER)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {
        "constants": {str(node.target): program.constant(node) for node in program.constants()}
    }
    namespace |= {node.target.__name__: node.target.boxed for node in program.ops() if hasattr(node.target, "boxed")}  # type: ignore[union-attr]
    exec(compile(source, filename, "exec"), namespace)
    engine = OffloadEngine(far_memory) if any(ops.is_transfer(node) for node in plan.order) else None
    parts: tuple[Segment, ...] = split_segments(program, plan)
    compiled = tuple(
        CompiledSegment(
            part.name, engine.around(function) if engine else function, produced_outputs(program, plan, part, parts)
        )
        for part, function in zip(parts, namespace["SEGMENTS"], strict=True)
    )
    executable = Executable(program, plan, source, compiled, engine, backend)
    weakref.finalize(executable, linecache.cache.pop, filename, None)
    return executable
