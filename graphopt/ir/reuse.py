"""Which operators can write their result into an operand that dies with them, and the storages that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.in_place import has_in_place_form, updated_arguments
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.spec import InputKind, OutputKind, TensorSpec
from graphopt.ir.storage import StorageMap, storage_map
from graphopt.ir.update_targets import update_targets
from graphopt.ir.updates import leads_to, parameter_of

_WRITABLE = (OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE)


@dataclass(frozen=True)
class PlannedReuse:
    """What ``reuse-last-use`` will do to a functional program in its present order.

    ``storages``: those of the result; ``operand``: for each operator that will write in place, what it writes into.
    """

    storages: StorageMap
    operand: Mapping[fx.Node, fx.Node]


def planned_reuse(program: Program, storages: StorageMap | None = None) -> PlannedReuse:
    """The PlannedReuse of ``program``, which is left as it is; ``storages``: its own, if known, in any order."""
    storages = storages or storage_map(program)
    facts = DyingOperands(program, storages)
    written: dict[fx.Node, fx.Node] = {}
    several: dict[fx.Node, tuple[int, ...]] = {}
    for node in program.ops():
        updated = facts.updated(node)
        if updated:
            facts.joined_results(node, updated)
            written[node] = next(iter(updated.values()))
            several[node] = tuple(facts.storage[operand] for operand in updated.values())
            continue
        operand = next(facts.reusable(node), None)
        if operand is not None and has_in_place_form(node, operand):
            written[node] = operand
            facts.joined(node, node, operand)
    held = {
        node: (facts.storage[node],) if node in facts.storage else numbers for node, numbers in storages.held.items()
    }
    held |= several
    return PlannedReuse(StorageMap(held, storages.nbytes, storages.resident), written)


class DyingOperands:
    """Last uses by storage, kept up to date while results join the storage of an operand."""

    def __init__(self, program: Program, storages: StorageMap) -> None:
        self.program = program
        self.storage = {node: numbers[0] for node, numbers in storages.held.items() if len(numbers) == 1}
        self.nbytes = storages.nbytes
        self.position = {node: i for i, node in enumerate(program.ops())}
        self.last_use: dict[int, int] = {}
        for node, position in self.position.items():
            for argument in node.all_input_nodes:
                for number in _read(storages, node, argument):
                    self.last_use[number] = position
        self.leads_to = leads_to(program)
        self.lazy = {number for node, number in self.storage.items() if _is_lazy(program.value(node))}
        self.written_by = _storages_with_update(program, self.storage)
        self.written = set(self.written_by)
        self.kept = self._kept(storages)
        self.members: dict[int, list[fx.Node]] = {}
        for node, number in self.storage.items():
            self.members.setdefault(number, []).append(node)

    def _kept(self, storages: StorageMap) -> set[int]:
        """Storages that nothing may write into: the caller's, constants, and those that leave the program."""
        kept = set(storages.resident) - self.written
        for value in nodes_in(self.program.output_values()):
            kept.update(storages.held[value])
        return kept

    def reusable(self, node: fx.Node) -> Iterator[fx.Node]:
        """Operands of ``node`` whose storage it may write its result into, first operand first."""
        return (operand for operand in self.fitting(node) if self._dies_at(node, operand))

    def fitting(self, node: fx.Node) -> Iterator[fx.Node]:
        """Operands of ``node`` that could take its result if they died with it, first operand first."""
        operands = ops.overwritable_arguments(node)
        if not operands or ops.is_mutating(node) or not ops.is_pure(node) or node not in self.storage:
            return
        spec = self.program.spec(node)
        for operand in operands:
            if operand in self.storage and self._fits(node, operand, spec):
                yield operand

    def updated(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """For an operator whose results may all be written into the arguments that they update: result to argument.

        Empty where that cannot be: an argument is read again, is not for writing, or is of another form.
        """
        operands = self.updatable(node)
        if len({self.storage[operand] for operand in operands.values()}) < len(operands):
            return {}
        return operands if all(self._dies_at(node, operand) for operand in operands.values()) else {}

    def updatable(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """As ``updated``, if the arguments died with ``node``."""
        operands = updated_arguments(node)
        results = {user.args[1]: user for user in node.users if ops.is_getitem(user)} if operands else {}
        if len(results) != len(operands) or len(results) != len(node.users):
            return {}
        found = {results[position]: operand for position, operand in enumerate(operands)}
        return found if all(self._takes(result, operand) for result, operand in found.items()) else {}

    def _takes(self, result: fx.Node, operand: fx.Node) -> bool:
        """Whether ``operand`` has the form of ``result`` and memory of its own."""
        if operand not in self.storage or result not in self.storage:
            return False
        spec = self.program.spec(result)
        return self.program.spec(operand) == spec and spec.nbytes == self.nbytes[self.storage[operand]]

    def _may_write(self, node: fx.Node, operand: fx.Node) -> bool:
        """Whether ``node`` belongs to the update of ``operand``, if that is a parameter or a state.

        What a step reads of a parameter and then no more (one whose master is what the update reads) must not be taken
        for free memory: the step may yet be skipped, or fail.
        """
        owner = self.written_by.get(self.storage[operand])
        return owner is None or self.leads_to.get(node) == owner

    def joined_results(self, node: fx.Node, updated: Mapping[fx.Node, fx.Node]) -> None:
        """The results of ``node`` and all views of them live in the storages of the arguments that they update."""
        for result, operand in updated.items():
            self._join(self.storage[result], self.storage[operand], self.position[node])

    def _join(self, old: int, new: int, position: int) -> None:
        """What lives in storage ``old`` lives in ``new`` from ``position`` on."""
        moved = self.members.pop(old)
        self.members[new].extend(moved)
        self.storage.update(dict.fromkeys(moved, new))
        self.last_use[new] = max(self.last_use.get(old, -1), position)
        if old in self.kept:
            self.kept.add(new)

    def _dies_at(self, node: fx.Node, operand: fx.Node) -> bool:
        number = self.storage[operand]
        return number not in self.kept and self.last_use.get(number) == self.position[node]

    def _fits(self, node: fx.Node, operand: fx.Node, spec: TensorSpec) -> bool:
        if self.program.spec(operand) != spec or spec.nbytes != self.nbytes[self.storage[operand]]:
            return False
        if not self._may_write(node, operand):
            return False
        if self.storage[node] == self.storage[operand]:
            return False
        # A conjugate or negative view keeps its bit while the bits below are overwritten: it would read them wrongly.
        if self.storage[node] in self.lazy or self.storage[operand] in self.lazy:
            return False
        offset = self.program.value(operand).storage_offset()
        for other in ops.tensor_arguments(node):
            if other is operand or self.storage.get(other) != self.storage[operand]:
                continue
            same_view = self.program.spec(other) == spec and self.program.value(other).storage_offset() == offset
            if not same_view:
                return False
        return True

    def joined(self, node: fx.Node, twin: fx.Node, operand: fx.Node) -> None:
        """``twin`` stands for ``node`` and lives in the storage of ``operand``; so do all views of ``node``."""
        old = self.storage[node]
        self.position[twin] = self.position[node]
        if twin is not node:
            self.members[old].append(twin)
        self._join(old, self.storage[operand], self.position[node])


def _read(storages: StorageMap, node: fx.Node, argument: fx.Node) -> tuple[int, ...]:
    """The storages of ``argument`` that ``node`` reads: who picks one element of a tuple does not read the others."""
    if not ops.is_getitem(node):
        return storages.held[argument]
    return tuple(number for number in storages.held[argument] if number in storages.held[node])


def _is_lazy(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _storages_with_update(program: Program, storage: dict[fx.Node, int]) -> dict[int, str]:
    """Storages of parameters and state that the program updates anyway, and the parameter that each belongs to."""
    buffers = {
        node
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind is InputKind.BUFFER
    }
    return {
        storage[update.target]: parameter_of(program, update.output)
        for update in update_targets(program)
        if update.output.kind in _WRITABLE and nodes_in((update.value,)) and update.target not in buffers
    }
