"""Erasing a call that nothing uses, and what only it used."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program


def erase_dead(program: Program, nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` that are pure calls without users, then what they alone were computed from."""
    waiting = list(nodes)
    erased: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in erased or node.op != "call_function" or node.users or not ops.is_pure(node):
            continue
        erased.add(node)
        waiting += node.all_input_nodes
        program.erase_if_unused(node)
