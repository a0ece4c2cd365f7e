"""The order of a program's calls, read and rewritten as one sequence."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from graphopt.ir.program import Program


def body(program: Program) -> tuple[fx.Node, ...]:
    """Constants and calls, in order: everything between the inputs and the outputs."""
    return tuple(node for node in program.graph.nodes if node.op not in ("placeholder", "output"))


def reorder(program: Program, order: Iterable[fx.Node]) -> None:
    """Let the constants and calls of ``program`` run in ``order``, which holds each of them once."""
    end = program.output_node()
    for node in order:
        end.prepend(node)
