"""The layer each call belongs to, from the module it comes from: ``model.layers.3`` for all that layer 3 does.

A layer is the shortest path that ends in a number (a child of a list of modules) and holds few enough calls; what lies
in no such path belongs to the rest, "". Calls without an origin belong where their neighbours do. Not every gradient
knows its module: what it reads of the forward tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import fx

from graphopt.ir.liveness import backward_nodes
from graphopt.ir.module_paths import numbered_prefixes
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind

_MOST_CALLS_OF_A_LAYER = 320
"""A list whose entries hold more than this in one segment is a list of stages, not of layers: look inside."""

_FEWEST_CALLS_OF_A_VISIT = 4
"""Fewer calls in a row than this do not interrupt the layer around them."""


class LayerNames:
    """Layers of the calls of one program."""

    def __init__(self, program: Program, bases_read: Callable[[fx.Node], Sequence[fx.Node]]) -> None:
        self._module = {node: program.origin(node).module for node in program.ops()}
        backward = backward_nodes(program)
        position = {node: i for i, node in enumerate(program.ops())}
        parameters = {
            node: entry.name
            for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
            if entry.kind is InputKind.PARAM
        }
        # A backward call without a layer of its own belongs where the parameter it reads does, or else the latest of
        # the forward values it reads.
        for node in program.ops():
            if node not in backward or numbered_prefixes(self._module[node]):
                continue
            read = bases_read(node)
            known = [parameters[base] for base in read if base in parameters]
            saved = [base for base in read if base in position and base not in backward]
            if not known and saved:
                known = [self._module[max(saved, key=position.__getitem__)]]
            self._module[node] = known[0] if known else self._module[node]

    def labels(self, calls: Sequence[fx.Node], *, compiles: Sequence[bool]) -> tuple[str, ...]:
        """The layer of each of ``calls``, which follow each other; only those that ``compiles`` count for lengths."""
        sizes = Counter(
            prefix
            for node, counts in zip(calls, compiles, strict=True)
            if counts
            for prefix in numbered_prefixes(self._module[node])
        )
        labels: list[str | None] = [self._layer(node, sizes) for node in calls]
        filled = _filled(labels)
        return _without_short_visits(filled, compiles)

    def _layer(self, node: fx.Node, sizes: Counter[str]) -> str | None:
        module = self._module[node]
        if not module:
            return None
        prefixes = numbered_prefixes(module)
        return next((prefix for prefix in prefixes if sizes[prefix] <= _MOST_CALLS_OF_A_LAYER), "")


def _filled(labels: Sequence[str | None]) -> list[str]:
    """Every call without a label gets that of the one before it (at the start: of the first one that has one)."""
    last = next((label for label in labels if label is not None), "")
    filled = []
    for label in labels:
        last = last if label is None else label
        filled.append(last)
    return filled


def _without_short_visits(labels: Sequence[str], compiles: Sequence[bool]) -> tuple[str, ...]:
    """Runs of few calls take the label before them, but not at the end: the last layer stays equal to the others."""
    result: list[str] = []
    start = 0
    while start < len(labels):
        end = start
        while end < len(labels) and labels[end] == labels[start]:
            end += 1
        is_short = sum(compiles[start:end]) < _FEWEST_CALLS_OF_A_VISIT
        is_visit = is_short and result and end < len(labels)
        result += [result[-1] if is_visit else labels[start]] * (end - start)
        start = end
    return tuple(result)
