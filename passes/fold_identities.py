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

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.merging import Merger, layout_of, same_tensor
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Pass, Refusal, until_stable


@dataclass(frozen=True)
class FoldIdentities(Pass):
    """Replace operators that change nothing by their input."""

    name: ClassVar[str] = "fold-identities"

    def apply(self, program: Program) -> Changes:
        """Fold in graph order, so that a fold is seen by all that follows."""
        return until_stable(program, _fold_once)


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
        if layout_of(node) is not None:
            self._latest[self._look(node)] = node

    def forget(self, node: fx.Node) -> None:
        """Never answer with ``node`` again."""
        if self._latest.get(self._look(node)) is node:
            del self._latest[self._look(node)]

    def _look(self, node: fx.Node) -> tuple[object, ...]:
        facts = layout_of(node)
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
