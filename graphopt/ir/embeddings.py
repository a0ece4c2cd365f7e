"""Which parameters are embedding tables: rows of them are looked up."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind

aten = torch.ops.aten

_LOOKUPS = (aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


def embedding_tables(program: Program) -> tuple[str, ...]:
    """Names of the parameters whose rows a lookup reads, directly or through copies, casts and views."""
    names = {
        node: entry.name
        for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
        if entry.kind is InputKind.PARAM
    }
    found: dict[str, None] = {}
    for node in program.ops():
        if ops.is_call(node, *_LOOKUPS):
            source = _source(node.args[0])
            if source in names:
                found[names[source]] = None
    return tuple(found)


def _source(node: object) -> fx.Node | None:
    """What ``node`` shows the elements of."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        copied = ops.copied_argument(node)
        if copied is None and not (ops.is_view(node) or ops.is_conversion(node)):
            break
        node = copied or node.args[0]
    return node if isinstance(node, fx.Node) else None
