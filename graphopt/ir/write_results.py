"""Operators with several results that update their arguments, turned into the form that writes them."""

from __future__ import annotations

from torch import fx

from graphopt.ir.in_place import writing_call
from graphopt.ir.program import Program
from graphopt.ir.reuse import DyingOperands
from graphopt.ir.storage import storage_map


def write_all_results(program: Program) -> None:
    """Let every such operator that may do so write its arguments."""
    facts = DyingOperands(program, storage_map(program))
    count = sum(write_results(program, facts, node) for node in program.ops())
    if count:
        program.refresh()


def write_results(program: Program, facts: DyingOperands, node: fx.Node) -> bool:
    """Whether ``node`` writes its results into the arguments that they update from now on: all of them, or none."""
    updated = facts.updated(node)
    if not updated:
        return False
    facts.joined_results(node, updated)
    writing_call(program, node)
    for result, operand in updated.items():
        program.replace(result, operand)
    program.erase_if_unused(node)
    return True
