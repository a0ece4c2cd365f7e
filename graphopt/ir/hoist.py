"""Moving a value's computation up in the order, together with what it is computed from."""

from __future__ import annotations

from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.storage import tensors_in


def hoist(program: Program, value: fx.Node, anchor: fx.Node, *, max_bytes: int) -> bool:
    """Whether ``value`` is computed before ``anchor`` now; nothing moves if not.

    Only constants and pure calls move, the latter of at most ``max_bytes`` each, and none that needs ``anchor`` or a
    result of it.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    late = _late_ancestors(value, order, order[anchor])
    if anchor in late or not all(_can_move(node, max_bytes) for node in late):
        return False
    for node in sorted(late, key=order.__getitem__):
        anchor.prepend(node)
    return True


def _late_ancestors(value: fx.Node, order: dict[fx.Node, int], limit: int) -> set[fx.Node]:
    """``value`` and what it is computed from, as far as it lies at position ``limit`` or behind."""
    found: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if order[node] >= limit and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _can_move(node: fx.Node, max_bytes: int) -> bool:
    return node.op == "get_attr" or (ops.is_pure(node) and _nbytes(node) <= max_bytes)


def _nbytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta.get("val")))
