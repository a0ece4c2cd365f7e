"""Values that the decision table marks are dropped after the forward part and computed again where they are needed.

Before::

    gelu = aten.gelu.default(x)                     # forward; x and gelu live until the backward part
    ...
    mm_7 = aten.mm.default(grad, gelu)              # backward

After (``gelu: recompute`` in the table)::

    gelu = aten.gelu.default(x)                     # dies in the forward part
    ...
    gelu_again = aten.gelu.default(x)               # right before its first late use
    mm_7 = aten.mm.default(grad, gelu_again)

Saves the bytes of each dropped value from its last use in the forward part to its first use in the backward part.
Costs one more run of its operator, and of dropped ones it is computed from, each once (a value with several copies in
the table: once in each phase that needs it). Random draws, writes and uninitialised memory are never run again: a table
that marks one is refused as a whole.

With ``budget`` (``recompute{budget=2GiB}``) it fills the table first, as ``decide-memory`` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from graphopt.errors import ProgramError
from graphopt.ir.decisions import Action
from graphopt.ir.hazards import protect_backward_reads, updates_parameters
from graphopt.ir.liveness import no_workspace
from graphopt.ir.program import Program, Stage
from graphopt.ir.twins import name_as_twin
from graphopt.pipeline.pass_base import Changes, Numerics, Pass
from graphopt.planner.decide import MemoryRequest, decide
from graphopt.planner.schedule import Choice, Schedule, schedule
from graphopt.planner.step_graph import StepGraph, step_graph
from graphopt.planner.table import choice_of


@dataclass(frozen=True)
class Recompute(Pass):
    """Compute values again in the backward part instead of keeping them, as the decision table says."""

    budget: str | None = None

    name: ClassVar[str] = "recompute"
    stage: ClassVar[Stage] = Stage.STEP
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def apply(self, program: Program) -> Changes:
        if Action.RECOMPUTE in program.decisions.executed:
            return Changes(0)
        if self.budget is not None:
            program.decisions = decide(program, MemoryRequest(budget=self.budget), no_workspace)
        if not program.decisions.with_action(Action.RECOMPUTE):
            return Changes(0)
        graph = step_graph(program, seconds={}, workspace=no_workspace)
        choice = choice_of(graph, program.decisions)
        _check_repeatable(graph, choice)
        count = _insert_twins(program, graph, schedule(graph, choice))
        program.decisions = replace(program.decisions, executed=(*program.decisions.executed, Action.RECOMPUTE))
        if count and not updates_parameters(program):
            # A module writes its buffers after the forward part; what runs again must read them as they were.
            protect_backward_reads(program)
        return Changes(count)


def _check_repeatable(graph: StepGraph, choice: Choice) -> None:
    for s in sorted(choice.dropped):
        if not graph.repeatable[graph.maker[s]]:
            node = graph.nodes[graph.maker[s]]
            raise ProgramError(f"{node.name} ({node.target}) draws numbers or writes and cannot run again: save it")


def _insert_twins(program: Program, graph: StepGraph, order: Schedule) -> int:
    """Put the calls that run again where the schedule has them; returns how many."""
    entries: list[fx.Node] = []
    stale: set[fx.Node] = set()
    count = 0
    for k, i in enumerate(order.node):
        node = graph.nodes[i]
        given = {graph.nodes[order.node[a]]: entries[a] for a in order.arguments[k]}
        if order.is_twin[k]:
            entries.append(_twin(program, node, graph.nodes[order.anchor[k]], given))
            count += 1
            continue
        entries.append(node)
        if any(entry is not argument for argument, entry in given.items()):
            node.args, node.kwargs = _reading(node, given)
            stale.add(node)
        if node in stale or not stale.isdisjoint(node.all_input_nodes):
            _share_memory_again(program, node, graph, i, stale)
    return count


def _share_memory_again(program: Program, node: fx.Node, graph: StepGraph, i: int, stale: set[fx.Node]) -> None:
    """Infer ``node`` anew if its value lies in the memory of an argument, which is another one now."""
    if len(graph.made[i]) < len(graph.held[i]):
        node.meta["val"] = program.infer(node)
        stale.add(node)
    else:
        stale.discard(node)


def _twin(program: Program, node: fx.Node, anchor: fx.Node, given: dict[fx.Node, fx.Node]) -> fx.Node:
    """The call of ``node`` again before ``anchor``, reading ``given`` in place of its arguments."""
    args, kwargs = _reading(node, given)
    twin = program.insert_before(anchor, node.target, *args, origin_of=node, **kwargs)  # type: ignore[arg-type]
    name_as_twin(program, twin, node)
    return twin


def _reading(node: fx.Node, given: dict[fx.Node, fx.Node]) -> Any:
    """The arguments of ``node`` with those in ``given`` exchanged."""
    return fx.map_arg((node.args, node.kwargs), lambda argument: given.get(argument, argument))
