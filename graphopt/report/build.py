"""The Report of an Executable: what is held at the peak, by class, and how memory goes up and down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphopt.execute.executable import Executable
from graphopt.execute.measure import MemoryTrace
from graphopt.execute.segments import Segment, split_segments
from graphopt.execute.state_rows import StateRow
from graphopt.ir.liveness import MemoryPlan
from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec
from graphopt.ir.storage import StorageMap, near_resident, storage_map
from graphopt.ir.text import value_text
from graphopt.report.classify import Classifier
from graphopt.report.data import AliveValue, MemoryByClass, MemoryClass, Report, TimelinePoint
from graphopt.report.fp8 import product_lines
from graphopt.report.state import bytes_beside

_NUM_LARGEST = 30


def build_report(
    executable: Executable,
    *,
    measured: MemoryTrace | None = None,
    notes: Sequence[str] = (),
    title: str = "",
    state: Sequence[StateRow] = (),
) -> Report:
    """The Report of ``executable``; ``measured`` is the trace of one of its steps.

    ``state``: the state of each parameter. What of it the program does not read is resident beside it.
    """
    program, plan = executable.program, executable.plan
    storages = storage_map(program)
    classifier = Classifier(program, plan, storages)
    peak = plan.order.index(plan.peak_at) if plan.peak_at is not None else 0
    memory, beside = _memory_by_class(program, plan, storages, classifier, peak), bytes_beside(program, state)
    return Report(
        records=program.history,
        memory=replace(memory, optimizer_state=memory.optimizer_state + beside),
        predicted_peak_bytes=plan.peak_bytes,
        resident_bytes=plan.resident_bytes + beside,
        measured_peak_bytes=measured.peak_bytes if measured is not None else None,
        timeline=_timeline(plan, split_segments(program)),
        largest=_largest(program, storages, classifier, peak),
        backend=executable.backend.name,
        backend_reason=executable.backend.reason,
        notes=(*executable.backend.notes, *notes),
        title=title or f"graphopt {program.stage} program",
        decisions=program.decisions,
        state=tuple(state),
        precision=program.precision,
        fp8=program.fp8,
        fp8_products=product_lines(program.fp8, _device(program)),
    )


def _device(program: Program) -> torch.device:
    """Where ``program`` runs: where its inputs lie."""
    specs = [entry.spec for entry in program.signature.inputs if isinstance(entry.spec, TensorSpec)]
    return next((spec.device for spec in specs if spec.device.type != "cpu"), torch.device("cpu"))


def segment_name(segments: Sequence[Segment], position: int) -> str:
    """The name of the segment that the operator at ``position`` belongs to."""
    return next((part.name for part in segments if part.start <= position < part.end), "")


def _memory_by_class(
    program: Program, plan: MemoryPlan, storages: StorageMap, classifier: Classifier, peak: int
) -> MemoryByClass:
    nbytes = dict.fromkeys(MemoryClass, 0)
    alive = classifier.alive_at(peak)
    for number in (*near_resident(program, storages), *alive):
        nbytes[classifier.memory_class(number, peak)] += storages.nbytes[number]
    inside_operator = plan.peak_bytes - sum(storages.nbytes[number] for number in alive)
    nbytes[MemoryClass.TEMPORARIES] += inside_operator
    return MemoryByClass(**{str(kind): size for kind, size in nbytes.items()})


def _timeline(plan: MemoryPlan, segments: Sequence[Segment]) -> tuple[TimelinePoint, ...]:
    names = [part.name for part in segments for _ in range(part.start, part.end)]
    return tuple(
        TimelinePoint(position, node.name, live, name)
        for position, (node, live, name) in enumerate(zip(plan.order, plan.live_bytes, names, strict=True))
    )


def _largest(program: Program, storages: StorageMap, classifier: Classifier, peak: int) -> tuple[AliveValue, ...]:
    by_size = sorted(classifier.alive_at(peak), key=lambda number: -storages.nbytes[number])[:_NUM_LARGEST]
    values = []
    for number in by_size:
        node = classifier.content(number, peak)
        spec, origin = value_text(node.meta["val"]), str(program.origin(node))
        kind = classifier.memory_class(number, peak)
        values.append(AliveValue(node.name, spec, storages.nbytes[number], origin, str(kind)))
    return tuple(values)
