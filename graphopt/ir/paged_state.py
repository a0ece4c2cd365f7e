"""Updates of paged state in a graph: what they read, and the fetch that may run ahead of one."""

from __future__ import annotations

from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.operators.paged_update import PAGE_IN

_FIRST = 8  # the position of the buffer with the first range among the arguments of an update


def waits_for_its_first_range(node: fx.Node) -> bool:
    """Whether ``node`` is an update of paged state that fetches all of it by itself."""
    return ops.is_paged_update(node) and ops.argument(node, _FIRST, "first") is None


def fetch_before(program: Program, node: fx.Node, anchor: fx.Node) -> None:
    """Let ``node`` take its first range from a fetch that starts before ``anchor``."""
    parameter, _, pages, _, _, rule, _, staging = node.args[:_FIRST]
    assert isinstance(parameter, fx.Node), "a parameter is an input"
    spec = program.spec(parameter)
    first = program.insert_before(anchor, PAGE_IN, pages, staging, rule, spec.numel, device=spec.device, origin_of=node)
    node.args = (*node.args[:_FIRST], first)
