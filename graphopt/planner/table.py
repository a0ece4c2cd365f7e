"""The decision table of an Outcome, and the Choice that a table stands for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from graphopt.errors import ProgramError
from graphopt.ir.decisions import Action, Decision, DecisionTable
from graphopt.ir.program import Program
from graphopt.planner.schedule import Choice
from graphopt.planner.simulate import Outcome
from graphopt.planner.step_graph import StepGraph


def decision_table(
    program: Program,
    graph: StepGraph,
    outcome: Outcome,
    *,
    policy: str,
    notes: tuple[str, ...] = (),
) -> DecisionTable:
    """One row for each value of the forward part that the backward part needs, itself or to compute others again."""
    copies = Counter(
        s
        for i, twin in zip(outcome.order.node, outcome.order.is_twin, strict=True)
        if twin
        for s in graph.made[i]
        if s in outcome.choice.dropped
    )
    saved = _saved_storages(graph, outcome)
    cuts = dict(outcome.choice.cuts)
    single = {s: place for s, place in _only_phases(graph, outcome).items() if copies[s] == 1}
    rows = []
    for s in graph.early_storages():
        if not copies[s] and s not in saved:
            continue
        node = graph.nodes[graph.value[s]]
        if s in outcome.choice.offloaded:
            rows.append(_offloaded_row(program, graph, s))
            continue
        again = copies[s] > 0
        rows.append(
            Decision(
                value=node.name,
                action=Action.RECOMPUTE if again else Action.SAVE,
                nbytes=graph.nbytes[s],
                seconds=graph.seconds[graph.maker[s]] * copies[s] if again else 0.0,
                reason=_why_again(outcome, s) if again else _why_saved(graph, s),
                source=str(program.origin(node)),
                copies=copies[s],
                again_at=tuple(graph.nodes[i].name for i in cuts.get(s, single.get(s, ()))) if again else (),
            )
        )
    phases = tuple(graph.nodes[i].name for i in outcome.choice.phases) if outcome.choice.renewed else ()
    return DecisionTable(policy, tuple(rows), phases, notes)


def _offloaded_row(program: Program, graph: StepGraph, s: int) -> Decision:
    node = graph.nodes[graph.value[s]]
    reason = "moves to host memory, which costs less than computing again"
    return Decision(node.name, Action.OFFLOAD, graph.nbytes[s], 0.0, reason, str(program.origin(node)))


def choice_of(graph: StepGraph, table: DecisionTable) -> Choice:
    """The Choice that ``table`` stands for. Raises ProgramError if it is about values that are not there."""
    by_name = {node.name: i for i, node in enumerate(graph.nodes)}
    again = table.with_action(Action.RECOMPUTE)
    named = (*(row.value for row in again), *(place for row in again for place in row.again_at), *table.phases)
    lost = [name for name in named if name not in by_name]
    if lost:
        raise ProgramError(f"decisions are about {lost[0]}, which the program does not have: decide again")
    storage = {row.value: graph.held[by_name[row.value]][0] for row in again}
    phases = tuple(sorted(by_name[name] for name in table.phases))
    renewed = frozenset(storage[row.value] for row in again if row.copies > 1 and not row.again_at)
    cuts = {storage[row.value]: tuple(sorted(by_name[name] for name in row.again_at)) for row in again if row.again_at}
    return Choice(frozenset(storage.values()), renewed, phases, tuple(sorted(cuts.items())))


def _only_phases(graph: StepGraph, outcome: Outcome) -> dict[int, tuple[int, ...]]:
    """For each renewed storage, the late node at which the phase of its last copy begins.

    One that ends up with a single copy is made there, not where the first late call would have wanted it.
    """
    choice, order = outcome.choice, outcome.order
    places = (graph.first_late, *(phase for phase in choice.phases if phase > graph.first_late))
    found: dict[int, tuple[int, ...]] = {}
    for k, i in enumerate(order.node):
        if order.is_twin[k]:
            place = places[max(bisect_right(places, order.anchor[k]) - 1, 0)]
            found.update({s: (place,) for s in graph.made[i] if s in choice.renewed})
    return found


def _saved_storages(graph: StepGraph, outcome: Outcome) -> set[int]:
    """Early storages that late calls or twins read as they were made."""
    saved: set[int] = set()
    order = outcome.order
    for k, i in enumerate(order.node):
        if order.is_twin[k] or (graph.is_call[i] and i >= graph.first_late):
            for a in order.arguments[k]:
                j = order.node[a]
                if graph.is_call[j] and j < graph.first_late and not order.is_twin[a]:
                    saved.update(s for s in graph.held[j] if not graph.resident[s])
    return saved


def _why_again(outcome: Outcome, s: int) -> str:
    if s in dict(outcome.choice.cuts):
        return "computed again at the calls named, when needed from there on"
    return "computed again in each phase that needs it" if s in outcome.choice.renewed else "computed again when needed"


def _why_saved(graph: StepGraph, s: int) -> str:
    if not graph.repeatable[graph.maker[s]]:
        return "a random draw or a write: running it again would give something else"
    return "cheaper to keep than to compute again"
