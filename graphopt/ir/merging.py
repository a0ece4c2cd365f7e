"""Letting two values of equal content and layout become one: when that is allowed, and what has to follow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program, Stage, nodes_in
from graphopt.ir.spec import UPDATE_KINDS, InputKind, OutputKind
from graphopt.ir.storage import storage_map, tensors_in
from graphopt.ir.update_targets import update_targets


def same_tensor(left: fx.Node, right: fx.Node) -> bool:
    """Whether two nodes have equal shape, dtype, strides and device, and neither is a lazy conjugate or negative."""
    return layout_of(left) is not None and layout_of(left) == layout_of(right)


def layout_of(node: fx.Node) -> tuple[object, ...] | None:
    """Shape, dtype, strides and device of one strided tensor; None for anything else, lazy conjugates included."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    return (tuple(value.shape), value.dtype, tuple(value.stride()), value.device)


class Merger:
    """Lets values of a Program become one, says when that is not allowed, and keeps the values of views right.

    For passes that walk a Program in graph order and replace nodes by earlier nodes of equal content and layout.
    Storages are joined as nodes are merged; all facts are about the joined ones.
    """

    def __init__(self, program: Program) -> None:
        storages = storage_map(program)
        self._program = program
        self._held = storages.held
        self._nbytes = storages.nbytes
        self._joined_to = list(range(len(storages.nbytes)))
        self._returned_nodes = set(nodes_in(program.output_values()))
        self._returned = self._numbers(self._returned_nodes)
        self._resident = set(storages.resident)
        self._written = self._numbers({item for node in program.ops() for item in ops.mutated_arguments(node)})
        self._overwritten = self._numbers(_overwritten_inputs(program))
        self._differentiable = _differentiable_nodes(program) if program.stage is Stage.FORWARD else set()
        self._stale: set[fx.Node] = set()

    def memory(self, node: fx.Node) -> tuple[int, ...]:
        """Numbers of the joined storages that ``node`` holds."""
        return tuple(self._root(number) for number in self._held[node])

    def share(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether two nodes share memory by now."""
        return not set(self.memory(left)).isdisjoint(self.memory(right))

    def objection(self, node: fx.Node, source: fx.Node) -> str | None:
        """Why ``node`` must not become ``source``, or None if it may."""
        if node in self._returned_nodes and (source.op != "call_function" or source in self._returned_nodes):
            return f"{source.name} would be returned as a second output or as an input itself"
        if self.reorders_gradients(node, source):
            return f"gradients of {source.name} would be added in another order; repeated once gradients exist"
        pairs = zip(self.memory(node), self.memory(source), strict=True)
        return next(filter(None, (self._join_objection(mine, its, source) for mine, its in pairs)), None)

    def _join_objection(self, mine: int, its: int, source: fx.Node) -> str | None:
        if mine == its:
            return None
        if mine in self._written or its in self._written:
            return f"memory of {source.name} or of its copy is written in place"
        if mine in self._returned and its in self._returned:
            return f"an output would share memory with another output ({source.name})"
        if mine in self._returned and its in self._resident:
            return f"an output would share memory with an input or a constant ({source.name})"
        if self._outgrows(its, mine):
            return f"would keep {self._nbytes[its]} bytes of {source.name} alive instead of {self._nbytes[mine]}"
        return None

    def outgrows(self, source: fx.Node, value: fx.Node) -> bool:
        """Whether keeping ``source`` alive in the place of ``value`` may hold more bytes."""
        pairs = zip(self.memory(source), self.memory(value), strict=True)
        return any(its != mine and self._outgrows(its, mine) for its, mine in pairs)

    def _outgrows(self, its: int, mine: int) -> bool:
        is_free = its in self._resident and its not in self._overwritten
        return not is_free and self._nbytes[its] > self._nbytes[mine]

    def reorders_gradients(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether reading ``source`` in place of ``node`` may change the order in which its gradient is summed.

        Only at stage "forward", and only for what may get a gradient: it is safe where all that reads ``source`` leads
        to ``node`` alone, as then the same terms are added in the same order. Float addition is not associative.
        """
        late = node
        while source in self._differentiable and late is not source:
            early = [item for item in late.all_input_nodes if item in self._differentiable]
            if len(early) != 1 or len(early[0].users) != 1:
                return True
            late = early[0]
        return False

    def merge(self, node: fx.Node, source: fx.Node) -> None:
        """Let all users of ``node``, the outputs included, use ``source``; ``node`` is erased."""
        for mine, its in zip(self.memory(node), self.memory(source), strict=True):
            self._joined_to[mine] = its
            for group in (self._returned, self._written):
                if mine in group:
                    group.add(its)
        if node in self._returned_nodes:
            self._returned_nodes.add(source)
        self._stale.update(node.users)
        self._program.replace(node, source)

    def substitute(self, node: fx.Node, fresh: fx.Node) -> None:
        """Let ``fresh``, just made and of the same spec, take the place of ``node``, which is erased."""
        self._held[fresh] = self._held[node]
        if node in self._differentiable:
            self._differentiable.add(fresh)
        self.merge(node, fresh)

    def settle(self, node: fx.Node) -> None:
        """Infer ``node`` again if it shows the memory of an argument that was replaced."""
        if node not in self._stale or not any(self.share(node, argument) for argument in node.all_input_nodes):
            return
        node.meta["val"] = self._program.infer(node)
        self._stale.update(node.users)

    def _root(self, number: int) -> int:
        while self._joined_to[number] != number:
            self._joined_to[number] = self._joined_to[self._joined_to[number]]
            number = self._joined_to[number]
        return number

    def _numbers(self, nodes: set[fx.Node]) -> set[int]:
        return {number for node in nodes for number in self._held[node]}


def _overwritten_inputs(program: Program) -> set[fx.Node]:
    """Inputs that an update overwrites before the step ends, as soon as nothing reads them any more."""
    kinds = UPDATE_KINDS - {OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE}
    return {update.target for update in update_targets(program) if update.output.kind in kinds}


def _differentiable_nodes(program: Program) -> set[fx.Node]:
    """Values through which a gradient may flow to a parameter or a batch input (for membership tests)."""
    found = {
        node
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind in (InputKind.PARAM, InputKind.BATCH) and _has_gradient(node)
    }
    for node in program.ops():
        reached = any(argument in found for argument in node.all_input_nodes)
        if reached and _has_gradient(node) and not ops.stops_gradient(node):
            found.add(node)
    return found


def _has_gradient(node: fx.Node) -> bool:
    leaves: Iterator[torch.Tensor] = tensors_in(node.meta.get("val"))
    return any(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves)
