"""The Report of an Executable: what is held at the peak, by class, and how memory goes up and down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from graphopt.capture.update import WINDOW
from graphopt.execute.executable import Executable
from graphopt.execute.measure import MemoryTrace
from graphopt.execute.segments import Segment, split_segments
from graphopt.ir.liveness import MemoryPlan
from graphopt.ir.program import Program
from graphopt.ir.spec import Input, InputKind
from graphopt.ir.storage import StorageMap, storage_map
from graphopt.ir.text import value_text
from graphopt.report.data import AliveValue, MemoryByClass, MemoryClass, Report, TimelinePoint
from graphopt.report.gradients import parameter_gradients
from graphopt.report.lifetimes import Lifetime, storage_lifetimes

_NUM_LARGEST = 30

_CLASS_OF_INPUT = {
    InputKind.PARAM: MemoryClass.PARAMETERS,
    InputKind.BUFFER: MemoryClass.BUFFERS,
    InputKind.BATCH: MemoryClass.BATCH,
    InputKind.TANGENT: MemoryClass.BATCH,
    InputKind.SEED: MemoryClass.BATCH,
    InputKind.SCALAR: MemoryClass.BATCH,
    InputKind.STATE: MemoryClass.OPTIMIZER_STATE,
}


def build_report(
    executable: Executable,
    *,
    measured: MemoryTrace | None = None,
    backend: str = "aten",
    backend_reason: str = "",
    notes: Sequence[str] = (),
    title: str = "",
) -> Report:
    """The Report of ``executable``; ``measured`` is the trace of one of its steps."""
    program, plan = executable.program, executable.plan
    storages = storage_map(program)
    segments = split_segments(program)
    lifetimes = storage_lifetimes(plan, storages)
    classes = classify_storages(program, storages, lifetimes)
    peak = plan.order.index(plan.peak_at) if plan.peak_at is not None else 0
    alive = {number: lifetime for number, lifetime in lifetimes.items() if lifetime.is_alive_at(peak)}
    return Report(
        records=program.history,
        memory=_memory_by_class(plan, storages, classes, alive),
        predicted_peak_bytes=plan.peak_bytes,
        resident_bytes=plan.resident_bytes,
        measured_peak_bytes=measured.peak_bytes if measured is not None else None,
        timeline=_timeline(plan, segments),
        largest=_largest(program, storages, classes, alive),
        backend=backend,
        backend_reason=backend_reason,
        notes=tuple(notes),
        title=title or f"graphopt {program.stage} program",
    )


def classify_storages(
    program: Program, storages: StorageMap, lifetimes: Mapping[int, Lifetime]
) -> dict[int, MemoryClass]:
    """The class of every storage, by number."""
    classes = _resident_classes(program, storages)
    forward_end = next((part.end for part in split_segments(program) if part.name == "forward"), 0)
    gradients = {node for values in parameter_gradients(program).values() for node in values}
    for number, lifetime in lifetimes.items():
        if lifetime.first >= forward_end and any(node in gradients for node in lifetime.holders):
            classes[number] = MemoryClass.GRADIENTS
        elif lifetime.first < forward_end <= lifetime.last:
            classes[number] = MemoryClass.ACTIVATIONS
        else:
            classes[number] = MemoryClass.TEMPORARIES
    return classes


def segment_name(segments: Sequence[Segment], position: int) -> str:
    """The name of the segment that the operator at ``position`` belongs to."""
    return next((part.name for part in segments if part.start <= position < part.end), "")


def holder_named(lifetime: Lifetime) -> fx.Node:
    """The node that a reader knows a storage by: the first that is one tensor."""
    return next((node for node in lifetime.holders if not _is_tuple(node)), lifetime.holders[0])


def _resident_classes(program: Program, storages: StorageMap) -> dict[int, MemoryClass]:
    classes = dict.fromkeys(storages.resident, MemoryClass.CONSTANTS)
    for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True):
        classes.update(dict.fromkeys(storages.held[node], _class_of_input(entry)))
    return classes


def _class_of_input(entry: Input) -> MemoryClass:
    if entry.kind is InputKind.STATE and entry.name.startswith(f"{WINDOW}."):
        return MemoryClass.GRADIENTS
    return _CLASS_OF_INPUT[entry.kind]


def _memory_by_class(
    plan: MemoryPlan, storages: StorageMap, classes: Mapping[int, MemoryClass], alive: Mapping[int, Lifetime]
) -> MemoryByClass:
    nbytes = dict.fromkeys(MemoryClass, 0)
    for number in (*sorted(storages.resident), *alive):
        nbytes[classes[number]] += storages.nbytes[number]
    inside_operator = plan.peak_bytes - sum(storages.nbytes[number] for number in alive)
    nbytes[MemoryClass.TEMPORARIES] += inside_operator
    return MemoryByClass(**{str(kind): size for kind, size in nbytes.items()})


def _timeline(plan: MemoryPlan, segments: Sequence[Segment]) -> tuple[TimelinePoint, ...]:
    names = [part.name for part in segments for _ in range(part.start, part.end)]
    return tuple(
        TimelinePoint(position, node.name, live, name)
        for position, (node, live, name) in enumerate(zip(plan.order, plan.live_bytes, names, strict=True))
    )


def _largest(
    program: Program, storages: StorageMap, classes: Mapping[int, MemoryClass], alive: Mapping[int, Lifetime]
) -> tuple[AliveValue, ...]:
    by_size = sorted(alive, key=lambda number: -storages.nbytes[number])[:_NUM_LARGEST]
    values = []
    for number in by_size:
        node = holder_named(alive[number])
        spec, origin = value_text(node.meta["val"]), str(program.origin(node))
        values.append(AliveValue(node.name, spec, storages.nbytes[number], origin, str(classes[number])))
    return tuple(values)


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (tuple, list))
