"""Add an embedding's gradient row by row to the other gradient of its weight: there is one full-size gradient, not two.

Before (a weight that is the embedding and the head of a model, or two lookups in one table)::

    rows: 'f32[B,T,D]'
    table: 'f32[V,D]' = aten.embedding_dense_backward.default(rows, ids, V, padding, False)
    gradient: 'f32[V,D]' = aten.add.Tensor(head_gradient, table)

After::

    gradient: 'f32[V,D]' = graphopt.add_embedding_rows.default(head_gradient, rows, ids, padding)

Saves ``V * D * itemsize`` bytes, often at the peak of a step that computes activations again; ``reuse-last-use`` lets
the operator write into ``head_gradient``. Saves the time of three passes over the table too; costs one of N rows.

Numerics. Rows of one token are summed first, in their order, as ``embedding_dense_backward`` does, so on a CPU all
values are equal (a zero may keep its sign). On CUDA the rows may be summed in another order.

Refuses gradients that are scaled by the frequency of a token, that something else reads or that are an output, sums
with a factor, tables that have no more rows than the batch, and gradients of unequal precision or layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.erase import erase_dead
from graphopt.ir.program import Program
from graphopt.operators.embedding_rows import ADD_EMBEDDING_ROWS
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

aten = torch.ops.aten


@dataclass(frozen=True)
class ScatterEmbeddingGradient(Pass):
    """A sum of a gradient and an embedding's gradient adds rows to the former."""

    name: ClassVar[str] = "scatter-embedding-gradient"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def apply(self, program: Program) -> Changes:
        count = 0
        refusals: list[Refusal] = []
        for node in program.ops():
            if not ops.is_call(node, aten.add.Tensor):
                continue
            first: Any = node.args[0]
            second: Any = node.args[1]
            objections = []
            for value, other in ((second, first), (first, second)):
                lookup = _lookup_gradient(value)
                if lookup is None:
                    continue
                objection = _objection(program, node, lookup, other)
                if objection is None:
                    _scatter(program, node, lookup, other)
                    count += 1
                    break
                objections.append(Refusal.at(lookup, objection))
            else:
                refusals += objections
        return Changes(count, tuple(refusals))


def _lookup_gradient(value: object) -> fx.Node | None:
    """``value``, if it is the gradient of a lookup."""
    if isinstance(value, fx.Node) and ops.is_call(value, aten.embedding_dense_backward.default):
        return value
    return None


def _objection(program: Program, node: fx.Node, lookup: fx.Node, other: Any) -> str | None:
    """Why ``lookup`` cannot be scattered into ``other``, or None."""
    rows, _, num_rows, _, scales_by_frequency = lookup.args
    if not isinstance(other, fx.Node) or other is lookup:
        return "what it is added to is no other gradient"
    if scales_by_frequency:
        return "each row is divided by how often its token occurs"
    if len(lookup.users) > 1:
        return "something else reads the gradient of the lookup as a whole"
    if ops.argument(node, 2, "alpha", 1) != 1:
        return "the sum has a factor"
    for value in (other, lookup):
        if program.spec(value) != program.spec(node):
            return f"the sum is {program.spec(node)}, and {value.name} is {program.spec(value)}"
    num_features = program.spec(lookup).shape[1]
    if program.spec(rows).numel >= num_rows * num_features:  # type: ignore[arg-type, operator]
        return "the batch has as many rows as the table, so its gradient is no larger"
    return None


def _scatter(program: Program, node: fx.Node, lookup: fx.Node, other: fx.Node) -> None:
    rows, ids, _, padding, _ = lookup.args
    sources = node.all_input_nodes
    scattered = program.insert_before(node, ADD_EMBEDDING_ROWS, other, rows, ids, padding, origin_of=lookup)
    program.take_over(node, scattered)
    erase_dead(program, sources)
