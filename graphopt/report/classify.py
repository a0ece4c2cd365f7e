"""What a piece of memory is for at a moment: it depends on the value that lies in it then."""

from __future__ import annotations

from torch import fx

from graphopt.capture.accumulation import WINDOW
from graphopt.execute.segments import split_segments
from graphopt.ir import ops
from graphopt.ir.fp8_watch import is_fp8_state
from graphopt.ir.liveness import MemoryPlan
from graphopt.ir.program import Program
from graphopt.ir.spec import Input, InputKind
from graphopt.ir.storage import StorageMap
from graphopt.report.data import MemoryClass
from graphopt.report.gradients import parameter_gradients
from graphopt.report.lifetimes import storage_lifetimes

_CLASS_OF_INPUT = {
    InputKind.PARAM: MemoryClass.PARAMETERS,
    InputKind.BUFFER: MemoryClass.BUFFERS,
    InputKind.BATCH: MemoryClass.BATCH,
    InputKind.TANGENT: MemoryClass.BATCH,
    InputKind.SEED: MemoryClass.BATCH,
    InputKind.SCALAR: MemoryClass.BATCH,
    InputKind.STATE: MemoryClass.OPTIMIZER_STATE,
}


class Classifier:
    """Classes of the storages of a planned Program; where operators write in place, one holds several in turn."""

    def __init__(self, program: Program, plan: MemoryPlan, storages: StorageMap) -> None:
        self.lifetimes = storage_lifetimes(plan, storages)
        self._storages = storages
        self.resident = _resident_classes(program, storages)
        self._position = {node: position for position, node in enumerate(plan.order)}
        self._forward_end = next((part.end for part in split_segments(program) if part.name == "forward"), 0)
        self._gradients = {node for values in parameter_gradients(program).values() for node in values}

    def alive_at(self, position: int) -> tuple[int, ...]:
        """Numbers of the storages that the program holds while the operator at ``position`` runs."""
        return tuple(number for number, lifetime in self.lifetimes.items() if lifetime.is_alive_at(position))

    def content(self, number: int, position: int) -> fx.Node:
        """The value that lies in a storage then: the last one that was computed into it, views left out."""
        holders = self.lifetimes[number].holders
        computed = [node for node in holders if self._is_computed(node)] or list(holders)
        return next((node for node in reversed(computed) if self._position[node] <= position), computed[0])

    def memory_class(self, number: int, position: int) -> MemoryClass:
        """The class of a storage while the operator at ``position`` runs."""
        if number in self.resident:
            return self.resident[number]
        lifetime = self.lifetimes[number]
        if self._position[self.content(number, position)] < self._forward_end:
            is_kept = lifetime.last >= self._forward_end
            return MemoryClass.ACTIVATIONS if is_kept else MemoryClass.TEMPORARIES
        is_gradient = any(node in self._gradients for node in lifetime.holders)
        return MemoryClass.GRADIENTS if is_gradient else MemoryClass.TEMPORARIES

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether a node is one tensor whose content it made, and no view (whatever its schema says)."""
        if isinstance(node.meta["val"], (tuple, list)):
            return False
        if ops.is_mutating(node) or ops.is_getitem(node):
            return True
        return not any(self._storages.shares(node, argument) for argument in node.all_input_nodes)


def _resident_classes(program: Program, storages: StorageMap) -> dict[int, MemoryClass]:
    classes = dict.fromkeys(storages.resident, MemoryClass.CONSTANTS)
    for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True):
        classes.update(dict.fromkeys(storages.held[node], _class_of_input(entry)))
    return classes


def _class_of_input(entry: Input) -> MemoryClass:
    if entry.kind is InputKind.STATE and entry.name.startswith(f"{WINDOW}."):
        return MemoryClass.GRADIENTS
    if entry.kind is InputKind.STATE and is_fp8_state(entry.name):
        return MemoryClass.FP8_STATE
    return _CLASS_OF_INPUT[entry.kind]
