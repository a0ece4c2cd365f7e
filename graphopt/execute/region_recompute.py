"""Values that the region which reads them computes again, instead of receiving them: cheap ones, inside fused code.

A pointwise value that crosses from one region to a later one is written to memory and read again. Where everything that
it is computed from is there anyway (parameters, and values that live at least as long), the reader computes it inside
the loop that uses it: less memory between forward and backward, and less to move. Nothing else lives longer for it.
The result of a layer normalisation counts as pointwise: its input, which its gradient reads, is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.execute.region_cuts import Owners, Span
from graphopt.execute.region_reads import OUTSIDE
from graphopt.execute.region_scalars import is_number
from graphopt.ir import ops
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program
from graphopt.ir.storage import tensors_in

_FEWEST_BYTES = 4096
"""A smaller value is kept: it costs nothing, and what it is computed from may be larger."""

_MOST_CALLS = 12
"""The longest expression computed again for one value; pointwise chains between two matrix products have 3 to 10."""

Readers = dict[fx.Node, set[int]]


@dataclass(frozen=True)
class Recomputed:
    """``by_span``: the calls that each span makes again; ``readers``: who reads what when it does."""

    by_span: dict[int, frozenset[fx.Node]]
    readers: Readers


def recompute_in_readers(
    program: Program, owners: Owners, spans: Sequence[Span], readers: Mapping[fx.Node, set[int]]
) -> Recomputed:
    """Which values of ``spans`` their readers compute again."""
    search = _Search(program, owners, spans, {node: set(numbers) for node, numbers in readers.items()})
    for node in reversed(program.ops()):
        search.consider(node)
    return Recomputed({number: frozenset(calls) for number, calls in search.by_span.items()}, search.readers)


class _Search:
    def __init__(self, program: Program, owners: Owners, spans: Sequence[Span], readers: Readers) -> None:
        self.owners = owners
        self.spans = spans
        self.readers = readers
        self.made_in = {node: number for number, span in enumerate(spans) for node in span.nodes}
        self.by_span: dict[int, set[fx.Node]] = {}
        self.written_in = _spans_of_writes(program, self.made_in)

    def consider(self, node: fx.Node) -> None:
        """Let the readers of ``node`` compute it again if all of them can."""
        number = self.made_in.get(self.owners.maker(node))
        outside = self.readers.get(node, set()) - {number}
        if number is None or not outside or not self._is_cheap(node) or _nbytes(node) < _FEWEST_BYTES:
            return
        if not all(reader != OUTSIDE and self.spans[reader].is_region for reader in outside):
            return
        found = self._expression(node, outside)
        if found is None:
            return
        calls, leaves = found
        self.readers[node] -= outside
        for leaf in leaves:
            self.readers.setdefault(leaf, set()).update(outside)
        for reader in outside:
            self.by_span.setdefault(reader, set()).update(calls)

    def _expression(self, node: fx.Node, wanted: set[int]) -> tuple[list[fx.Node], list[fx.Node]] | None:
        """The calls that make ``node`` from values that all of ``wanted`` can read, and those values; None if none."""
        calls: dict[fx.Node, None] = {}
        leaves: dict[fx.Node, None] = {}
        open_nodes = [node]
        while open_nodes:
            current = open_nodes.pop()
            maker = self.owners.maker(current)
            calls |= {maker: None, current: None}
            if len(calls) > _MOST_CALLS:
                return None
            for base in self.owners.bases_read(maker):
                if self._is_there(base, wanted):
                    leaves[base] = None
                elif self._is_cheap(base):
                    open_nodes.append(base)
                else:
                    return None
        return list(calls), list(leaves)

    def _is_there(self, base: fx.Node, wanted: set[int]) -> bool:
        """Whether ``base`` is alive with its content while the last of ``wanted`` runs, whatever is decided here."""
        if base.op == "get_attr" or is_number(base):
            return True
        if base.op == "placeholder":
            return max(wanted) <= self.written_in.get(base, max(wanted))
        there = self.readers.get(base, set()) - {self.made_in.get(self.owners.maker(base))}
        return bool(there) and (OUTSIDE in there or max(there) >= max(wanted))

    def _is_cheap(self, node: fx.Node) -> bool:
        number = self.made_in.get(self.owners.maker(node))
        if number is None or not self.spans[number].is_region or not ops.is_pure(node):
            return False
        return ops.is_pointwise(node) or ops.is_normalised_row(node)


def _spans_of_writes(program: Program, made_in: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The span during or after which each input is overwritten; -1 for one that is written between the segments."""
    plan = plan_memory(program)
    found: dict[fx.Node, int] = {write.target: -1 for write in plan.write_at_end}
    last = 0
    for node, writes in zip(plan.order, plan.write_after, strict=True):
        last = max(last, made_in.get(node, 0))
        found |= {write.target: last for write in writes}
    return found


def _nbytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors_in(node.meta["val"]))
