"""Fold identities: an operator that changes nothing is replaced by its input.

Before::

    copy: 'f32[8,16]' = aten.clone.default(hidden)
    turned: 'f32[16,8] strides[1, 16]' = aten.t.default(copy)
    back: 'f32[8,16]' = aten.t.default(turned)
    flat: 'f32[128]' = aten.view.default(back, [128])
    rows: 'f32[4,32]' = aten.view.default(flat, [4, 32])

After::

    turned: 'f32[16,8] strides[1, 16]' = aten.t.default(hidden)
    rows: 'f32[4,32]' = aten.view.default(hidden, [4, 32])

Three rules:

1. A view that shows the same memory with the same shape, strides and offset as an earlier value is that value.
2. A copy (clone, cast to the same dtype, ``cat`` of one tensor, idle dropout, ...) whose shape, dtype, strides and
   device are its argument's is that argument.
3. A reshape of a reshape that nothing else reads reshapes the base.

Saves: for each copy, ``numel * itemsize`` bytes while both lived. Views hold no memory; their calls go. What nothing
reads any more afterwards is left to drop-dead.
Costs: nothing; the lives of a copy and its source follow on each other, so the peak never rises.

Refuses (see ``Merger``): where two outputs, or an output and an input, that were independent tensors would come to
share memory; where a small copy lets a large memory die; where memory is written in place; and at stage "forward",
where gradients will be added up in the order of use, where that order would change. ``detach`` stays at that stage: it
stops the gradient. A cast that narrows and one that widens again are two casts of different dtypes: both stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program, Stage, nodes_in
from graphopt.ir.spec import UPDATE_KINDS, InputKind, OutputKind, updated_input_kind
from graphopt.ir.storage import storage_map, tensors_in
from graphopt.pipeline.pass_base import Changes, Pass, Refusal


@dataclass(frozen=True)
class FoldIdentities(Pass):
    """Replace operators that change nothing by their input."""

    name: ClassVar[str] = "fold-identities"

    def apply(self, program: Program) -> Changes:
        """Fold in graph order, so that a fold is seen by all that follows."""
        return until_stable(program, _fold_once)


def until_stable(program: Program, sweep: Callable[[Program], Changes]) -> Changes:
    """The sum of the changes of ``sweep``, run until it changes nothing, and the refusals of its last run."""
    count = 0
    while True:
        changes = sweep(program)
        count += changes.count
        if not changes.count:
            return Changes(count, changes.refusals)


def same_tensor(left: fx.Node, right: fx.Node) -> bool:
    """Whether two nodes have equal shape, dtype, strides and device, and neither is a lazy conjugate or negative."""
    return _facts(left) is not None and _facts(left) == _facts(right)


def _facts(node: fx.Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    return (tuple(value.shape), value.dtype, tuple(value.stride()), value.device)


def _fold_once(program: Program) -> Changes:
    merger = Merger(program)
    views = _KnownViews(program, merger)
    count = 0
    refusals = []
    for node in tuple(program.graph.nodes)[:-1]:  # all but the output; constants may lie between the calls
        merger.settle(node)
        source = views.twin(node) or _copied(program, node)
        objection = merger.objection(node, source) if source is not None else None
        if source is not None and objection is None:
            merger.merge(node, source)
            count += 1
            continue
        if source is not None and objection is not None:
            refusals.append(Refusal.at(node, objection))
        count += _skip_reshape(program, merger, views, node)
        views.add(node)
    return Changes(count, tuple(refusals))


def _copied(program: Program, node: fx.Node) -> fx.Node | None:
    """The argument that ``node`` copies without any change, or None."""
    if program.stage is Stage.FORWARD and ops.stops_gradient(node):
        return None
    source = ops.copied_argument(node)
    return source if source is not None and same_tensor(node, source) else None


def _skip_reshape(program: Program, merger: Merger, views: _KnownViews, node: fx.Node) -> int:
    """Let a reshape of a reshape read the base; the number of calls saved."""
    inner = node.args[0] if ops.is_reshape(node) else None
    if not isinstance(inner, fx.Node) or not ops.is_reshape(inner) or len(inner.users) > 1:
        return 0
    base = inner.args[0]
    assert isinstance(base, fx.Node), f"{inner.name} reshapes no node"
    if not program.value(base).is_contiguous() or not merger.share(node, base) or merger.reorders_gradients(node, base):
        return 0
    node.replace_input_with(inner, base)
    views.forget(inner)
    program.erase_if_unused(inner)
    return 1


class _KnownViews:
    """The latest value for each way of looking at a memory."""

    def __init__(self, program: Program, merger: Merger) -> None:
        self._merger = merger
        self._detach_matters = program.stage is Stage.FORWARD
        self._detached_by: dict[fx.Node, fx.Node] = {}
        self._latest: dict[tuple[object, ...], fx.Node] = {}

    def twin(self, node: fx.Node) -> fx.Node | None:
        """An earlier value that is the same part of the same memory as the view ``node``, or None."""
        base = _viewed(node)
        if base is None:
            return None
        if self._detach_matters and ops.stops_gradient(node):
            self._detached_by[node] = node
        elif base in self._detached_by:
            self._detached_by[node] = self._detached_by[base]
        return self._latest.get(self._look(node))

    def add(self, node: fx.Node) -> None:
        """Remember ``node``, which stays."""
        if _facts(node) is not None:
            self._latest[self._look(node)] = node

    def forget(self, node: fx.Node) -> None:
        """Never answer with ``node`` again."""
        if self._latest.get(self._look(node)) is node:
            del self._latest[self._look(node)]

    def _look(self, node: fx.Node) -> tuple[object, ...]:
        facts = _facts(node)
        if facts is None:
            return (node,)
        memory = self._merger.memory(node)
        return (*memory, self._detached_by.get(node), node.meta["val"].storage_offset(), *facts)


def _viewed(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a view of: an argument, or that of the multi-output view it is picked from."""
    maker = node.args[0] if ops.is_getitem(node) else node
    if not isinstance(maker, fx.Node) or not ops.is_view(maker):
        return None
    return maker.args[0] if isinstance(maker.args[0], fx.Node) else None


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
    placeholders = program.placeholders()
    kinds = UPDATE_KINDS - {OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE}
    indices = (
        program.signature.input_index(output.name, updated_input_kind(output.kind))
        for _, output in program.signature.outputs_of(*kinds)
    )
    return {placeholders[index] for index in indices if index is not None}


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
