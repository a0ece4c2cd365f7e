"""Operators with several results that update their arguments, turned into the form that writes them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphopt.ir.in_place import writing_call
from graphopt.ir.program import Program
from graphopt.ir.reuse import DyingOperands
from graphopt.ir.storage import storage_map


def write_all_results(program: Program) -> int:
    """Let every such operator that may do so write its arguments; returns how many do."""
    facts = DyingOperands(program, storage_map(program))
    count = 0
    for node in program.ops():
        updated = facts.updated(node)
        if updated:
            facts.joined_results(node, updated)
            write_results(program, node, updated)
            count += 1
    if count:
        program.refresh()
    return count


def write_results(program: Program, node: fx.Node, updated: Mapping[fx.Node, fx.Node]) -> None:
    """Let ``node`` write its results into the arguments that they update (``DyingOperands.updated``)."""
    writing_call(program, node)
    for result, operand in updated.items():
        program.replace(result, operand)
    program.erase_if_unused(node)
