"""Which kept values move to host memory, by the Offload policy and for a budget."""

from __future__ import annotations

from dataclasses import replace

from graphopt.checkpoint import Offload, host_bytes
from graphopt.ir.decisions import Action, DecisionTable
from graphopt.ir.offloadable import OffloadFacts
from graphopt.ir.program import Program
from graphopt.planner.costs import Rates
from graphopt.planner.schedule import Choice
from graphopt.planner.simulate import Outcome, simulate
from graphopt.planner.step_graph import StepGraph

_LEAST_BYTES = 4096
"""Smaller values stay: a page is what a copy moves at least."""
_VISIBLE = 0.2
"""The part of a transfer's time that is taken to show: the rest runs beside the work, as far as the link keeps up."""


def offload_saved(program: Program, table: DecisionTable, policy: Offload, rates: Rates) -> DecisionTable:
    """``table`` with its saved values offloaded, largest first, as far as the host budget reaches."""
    facts = OffloadFacts(program)
    by_name = {node.name: node for node in program.graph.nodes}
    room = None if policy.host_budget is None else host_bytes(policy.host_budget)
    decided = {}
    for row in sorted(table.with_action(Action.SAVE), key=lambda row: (-row.nbytes, row.value)):
        objection = facts.objection(by_name[row.value])
        if row.nbytes < _LEAST_BYTES:
            objection = "too small to be worth two copies"
        if objection is None and room is not None and row.nbytes > room:
            objection = "the host budget is used up"
        if objection is not None:
            decided[row.value] = replace(row, reason=f"stays: {objection}")
            continue
        room = None if room is None else room - row.nbytes
        seconds = _transfer_seconds(row.nbytes, rates)
        decided[row.value] = replace(row, action=Action.OFFLOAD, seconds=seconds, reason="moves to host memory")
    return replace(table, rows=tuple(decided.get(row.value, row) for row in table.rows))


def _offloadable_storages(program: Program, graph: StepGraph) -> tuple[int, ...]:
    """Storages that can leave, largest first."""
    facts = OffloadFacts(program)
    found = [
        s
        for s in graph.early_storages()
        if graph.nbytes[s] >= _LEAST_BYTES
        and len(graph.made[graph.maker[s]]) == 1
        and facts.objection(graph.nodes[graph.value[s]]) is None
    ]
    return tuple(sorted(found, key=lambda s: (-graph.nbytes[s], s)))


def plan_offload(program: Program, graph: StepGraph, policy: Offload, limit_bytes: int) -> Outcome | None:
    """The Outcome that offloads the fewest values (largest first) such that the peak, with as many values in flight as
    are prefetched, stays within ``limit_bytes``; None if not even all of them reach it."""
    candidates = _offloadable_storages(program, graph)
    room = None if policy.host_budget is None else host_bytes(policy.host_budget)
    if room is not None:
        held = 0
        fitting = []
        for s in candidates:
            if held + graph.nbytes[s] <= room:
                held += graph.nbytes[s]
                fitting.append(s)
        candidates = tuple(fitting)
    if not candidates:
        return None
    in_flight = 2 * policy.prefetch * graph.nbytes[candidates[0]]

    def outcome(count: int) -> Outcome:
        moved = frozenset(candidates[:count])
        return simulate(graph, Choice(dropped=moved, offloaded=moved))

    low, high = 1, len(candidates)
    if outcome(high).peak_bytes + in_flight > limit_bytes:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if outcome(middle).peak_bytes + in_flight <= limit_bytes else (middle + 1, high)
    return outcome(low)


def transfer_seconds(graph: StepGraph, outcome: Outcome, rates: Rates) -> float:
    """What the transfers of ``outcome`` are taken to cost."""
    return sum(_transfer_seconds(graph.nbytes[s], rates) for s in sorted(outcome.choice.offloaded))


def _transfer_seconds(nbytes: int, rates: Rates) -> float:
    """What shows of one copy out and one copy in."""
    return _VISIBLE * 2 * nbytes / rates.host_bytes
