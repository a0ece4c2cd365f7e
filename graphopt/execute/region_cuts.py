"""Which calls of a step are compiled together: contiguous parts of its order, cut where layers begin.

The order of the calls is the plan, so a region is a part of that order and nothing moves across its ends. What a region
cannot hold (random draws, writes, operators of our own, arithmetic on Python numbers) stays a plain call between them.

Views belong to nobody: each region makes the views that it reads by itself, so that only whole storages cross borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.execute import fp8_decompositions
from graphopt.execute.layer_names import LayerNames
from graphopt.execute.region_scalars import can_take_numbers
from graphopt.execute.segments import split_segments
from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.storage import StorageMap, storage_map, tensors_in

MOST_CALLS = 160
"""Calls in one region. A transformer layer has 40 to 130, its update 8 for each parameter."""

FEWEST_CALLS = 3
"""Below this a region saves less than its call costs (some 20 us), and nothing in it can fuse."""


@dataclass(frozen=True)
class Span:
    """Calls that follow each other in the order: compiled as one region, or left as plain calls."""

    nodes: tuple[fx.Node, ...]
    is_region: bool


class Owners:
    """Which nodes make a value of their own, and which are views, or elements of a tuple that another node made."""

    def __init__(self, program: Program) -> None:
        self.storages: StorageMap = storage_map(program)

    def is_alias(self, node: fx.Node) -> bool:
        """Whether ``node`` is a call that only gives another form to the storage of its first argument."""
        if node.op != "call_function" or ops.has_effect(node) or ops.is_random(node) or not node.args:
            return False
        source = node.args[0]
        if not isinstance(source, fx.Node) or not self.storages.held[node]:
            return False
        if isinstance(source.meta["val"], (tuple, list)):
            return self.is_alias(source)
        return set(self.storages.held[node]) <= set(self.storages.held[source])

    def base(self, node: fx.Node) -> fx.Node:
        """The value whose storage ``node`` gives another form to: an input, a result, or an element of a result."""
        while self.is_alias(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    def maker(self, node: fx.Node) -> fx.Node:
        """The input or call that made the storage of ``node``."""
        base = self.base(node)
        return base.args[0] if ops.is_getitem(base) else base  # type: ignore[return-value]

    def bases_read(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The bases of what ``node`` reads."""
        return tuple(dict.fromkeys(self.base(argument) for argument in node.all_input_nodes))

    def makers_read(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The makers of what ``node`` reads."""
        return tuple(dict.fromkeys(self.maker(argument) for argument in node.all_input_nodes))


def cut_spans(program: Program, owners: Owners) -> tuple[Span, ...]:
    """The order of ``program`` as spans; views and tuple elements are in none of them."""
    order = program.ops()
    layers = LayerNames(program, owners.bases_read)
    spans: list[Span] = []
    for segment in split_segments(program):
        calls = [
            node
            for node in order[segment.start : segment.end]
            if not ops.is_getitem(node) and not owners.is_alias(node)
        ]
        spans += _Cutter(owners, layers).cut(calls)
    return tuple(spans)


def halves(span: Span, owners: Owners) -> tuple[Span, Span]:
    """``span`` cut in two where the fewest bytes cross, as near to its middle as that allows."""
    position = _narrowest(span.nodes, owners)
    return (
        Span(span.nodes[:position], _repays_a_call(span.nodes[:position])),
        Span(span.nodes[position:], _repays_a_call(span.nodes[position:])),
    )


class _Cutter:
    """Cuts the calls of one segment."""

    def __init__(self, owners: Owners, layers: LayerNames) -> None:
        self.owners = owners
        self.layers = layers
        self.spans: list[Span] = []
        self.run: list[fx.Node] = []
        self.hoisted: list[fx.Node] = []

    def cut(self, calls: Sequence[fx.Node]) -> list[Span]:
        """The spans of ``calls``."""
        labels = self.layers.labels(calls, compiles=[not stays_plain(node) for node in calls])
        current = None
        for node, label in zip(calls, labels, strict=True):
            if stays_plain(node):
                self._plain(node)
                continue
            if label != current:
                self._close()
                current = label
            self.run.append(node)
        self._close()
        return self.spans

    def _plain(self, node: fx.Node) -> None:
        """Put a plain call in front of the open run if it needs nothing from it; otherwise the run ends here."""
        if _may_move_up(node) and not _reads_any(self.owners, node, self.run):
            self.hoisted.append(node)
            return
        self._close()
        self.spans.append(Span((node,), is_region=False))

    def _close(self) -> None:
        if self.hoisted:
            self.spans.append(Span(tuple(self.hoisted), is_region=False))
        self.spans += _bounded(tuple(self.run), self.owners)
        self.hoisted, self.run = [], []


def _bounded(run: tuple[fx.Node, ...], owners: Owners) -> list[Span]:
    if not run:
        return []
    if len(run) <= MOST_CALLS:
        return [Span(run, _repays_a_call(run))]
    position = _narrowest(run, owners)
    return _bounded(run[:position], owners) + _bounded(run[position:], owners)


def _repays_a_call(run: Sequence[fx.Node]) -> bool:
    """Whether ``run`` is worth a region. An FP8 cast counts twice: it is a sweep for scales and one for codes."""
    return len(run) + sum(ops.is_fp8_cast(node) for node in run) >= FEWEST_CALLS


def _narrowest(run: Sequence[fx.Node], owners: Owners) -> int:
    """The position in the middle half of ``run`` that the fewest bytes cross which were made in it."""
    place = {node: i for i, node in enumerate(run)}
    last_read = dict(place)
    for node in run:
        for read in owners.makers_read(node):
            if read in place:
                last_read[read] = place[node]
    middle = len(run) / 2
    return min(
        range(max(1, len(run) // 4), max(2, len(run) * 3 // 4 + 1)),
        key=lambda cut: (
            sum(_nbytes(node) for node in run[:cut] if last_read[node] >= cut),
            abs(cut - middle),
        ),
    )


def _nbytes(node: fx.Node) -> int:
    return sum(int(tensor.untyped_storage().nbytes()) for tensor in tensors_in(node.meta["val"]))


def stays_plain(node: fx.Node) -> bool:
    """Whether ``node`` must be called as it is: eager's random bits, writes, what Inductor does not know."""
    op = ops.overload(node)
    if op is None or not (op.namespace in ("aten", "prims") or _is_known_fp8(node)):
        return True
    if ops.is_random(node) or ops.has_effect(node) or ops.is_uninitialised(node):
        return True
    tensors = [tensor for item in (node, *node.all_input_nodes) for tensor in tensors_in(item.meta["val"])]
    if len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
        return True  # a transfer between devices keeps its place in the order
    if any(_is_unusual(tensor) for tensor in tensors):
        return True
    return not can_take_numbers(node)


def _is_known_fp8(node: fx.Node) -> bool:
    """Whether ``node`` is an FP8 cast that can be taken apart, or an FP8 product: a call inside, as ``mm`` is one."""
    return fp8_decompositions.can_fuse(node) or ops.is_fp8_matmul(node)


def _is_unusual(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_conj() or tensor.is_neg()


def _may_move_up(node: fx.Node) -> bool:
    """Whether only its arguments bind ``node`` to its place among compiled calls: numbers, factories, random draws.

    Plain calls never pass each other, so the draws keep their order.
    """
    return ops.is_scalar_op(node) or ops.is_uninitialised(node) or (ops.is_random(node) and not ops.has_effect(node))


def _reads_any(owners: Owners, node: fx.Node, run: Sequence[fx.Node]) -> bool:
    if takes_shape_alone(node):
        return False
    made = set(run)
    return any(read in made for read in owners.makers_read(node))


def takes_shape_alone(node: fx.Node) -> bool:
    """Whether ``node`` takes from the tensors it reads shape and layout, not the content."""
    return ops.is_uninitialised(node) or ops.draws_by_shape(node)
