"""From a policy or a budget to the decision table of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from graphopt.checkpoint import Offload, Policy, policy_parts
from graphopt.errors import BudgetError, UnsupportedError
from graphopt.ir.decisions import DecisionTable
from graphopt.ir.liveness import Workspace, forward_end
from graphopt.ir.program import Program
from graphopt.ir.units import format_bytes, parse_bytes
from graphopt.planner.costs import Rates, call_seconds
from graphopt.planner.frontier import search_frontier
from graphopt.planner.machine_rates import machine_rates
from graphopt.planner.offloading import offload_saved, plan_offload, transfer_seconds
from graphopt.planner.policies import policy_choice
from graphopt.planner.schedule import KEEP_ALL
from graphopt.planner.simulate import Outcome, simulate
from graphopt.planner.step_graph import StepGraph, step_graph
from graphopt.planner.table import decision_table

Budget = int | str | Fraction

_LARGEST_SHOWN = 3


@dataclass(frozen=True)
class MemoryRequest:
    """What is asked for: a policy, a budget of the whole step, both, or neither.

    ``budget``: bytes (a number or text such as "2GiB"), or a Fraction of what the step needs when it keeps everything.
    ``reserved_bytes``: what rests beside the program while it runs (optimizer state that this program does not read).
    ``margin_bytes``: how much below the budget to plan (what a backend was found to need beyond the plan).
    ``rates``: what calls cost (None: those of this machine, see ``machine_rates``).
    """

    policy: Policy | None = None
    budget: Budget | None = None
    reserved_bytes: int = 0
    margin_bytes: int = 0
    rates: Rates | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked for."""
        return self.policy is None and self.budget is None

    @property
    def recomputes(self) -> bool:
        """Whether the policy computes values again."""
        return any(not isinstance(part, Offload) for part in policy_parts(self.policy))

    @property
    def offload(self) -> Offload | None:
        """The part of the policy that moves values to host memory."""
        return next((part for part in policy_parts(self.policy) if isinstance(part, Offload)), None)

    @property
    def prefetch(self) -> int:
        """How many values are on their way back ahead of use."""
        return Offload().prefetch if self.offload is None else self.offload.prefetch


NO_REQUEST = MemoryRequest()


def check_budget(budget: object) -> Budget | None:
    """``budget`` as ``compile`` takes it; raises UnsupportedError for what is no budget."""
    if budget is None:
        return None
    if isinstance(budget, Fraction):
        if budget <= 0:
            raise UnsupportedError(f"memory expects a positive Fraction of the whole step, came {budget}")
        return budget
    if isinstance(budget, float):
        raise UnsupportedError(
            f"memory expects bytes, text such as '2GiB' or a Fraction of the whole step, came the float {budget!r}: "
            f"write memory=Fraction({budget!r})"
        )
    if isinstance(budget, (int, str)):
        parse_bytes(budget, name="memory")
        return budget
    raise UnsupportedError(f"memory expects bytes, text such as '2GiB' or a Fraction, came {budget!r}")


def decide(program: Program, request: MemoryRequest, workspace: Workspace) -> DecisionTable:
    """The decisions for ``program`` (functional, at stage step). Raises BudgetError when the budget cannot be met.

    A program without a backward part (an evaluation, the update that ends a window) has nothing to decide: policies and
    fractions are about the step that has one, and only a budget in bytes must hold here as well.
    """
    if _backward_is_missing(program):
        if not isinstance(request.budget, (int, str)):
            return program.decisions
        request = replace(request, policy=None)
    rates = request.rates or machine_rates()
    graph = step_graph(program, seconds=call_seconds(program, rates), workspace=workspace)
    whole = graph.resident_bytes + request.reserved_bytes
    recompute = [part for part in policy_parts(request.policy) if not isinstance(part, Offload)]
    if request.budget is not None and not recompute:
        return _planned(program, graph, request, whole, rates)
    choice = policy_choice(program, graph, recompute) if recompute else KEEP_ALL
    table = _checked(program, graph, simulate(graph, choice), request, whole)
    return table if request.offload is None else offload_saved(program, table, request.offload, rates)


def _backward_is_missing(program: Program) -> bool:
    """Whether no call of ``program`` belongs to a backward part."""
    return forward_end(program) >= len(program.ops())


def _planned(program: Program, graph: StepGraph, request: MemoryRequest, whole: int, rates: Rates) -> DecisionTable:
    everything = simulate(graph, KEEP_ALL)
    budget = _budget_bytes(request, whole + everything.peak_bytes)
    table = _within(program, graph, request, (everything, budget - whole - request.margin_bytes), whole, rates)
    return replace(table, budget_bytes=budget)


def _within(
    program: Program,
    graph: StepGraph,
    request: MemoryRequest,
    limited: tuple[Outcome, int],
    whole: int,
    rates: Rates,
) -> DecisionTable:
    """The cheapest decisions within a limit; ``limited``: the outcome of keeping everything, and the limit."""
    everything, limit = limited
    if everything.peak_bytes <= limit:
        note = f"the budget of {format_bytes(limit + whole)} holds without dropping anything"
        return _table(program, graph, everything, f"memory={request.budget}", (note,))
    frontier = search_frontier(graph)
    best = frontier.best(limit)
    if request.offload is not None:
        moved = plan_offload(program, graph, request.offload, limit)
        if moved is not None and (best is None or transfer_seconds(graph, moved, rates) < best.seconds):
            return _table(program, graph, moved, f"memory={request.budget} with {request.offload}", ())
    if best is None:
        smallest = min(frontier.outcomes, key=lambda outcome: outcome.peak_bytes)
        raise BudgetError(_budget_message(program, graph, smallest, limit, whole), smallest.peak_bytes + whole)
    note = f"smallest feasible budget found: {format_bytes(frontier.smallest_peak + whole)}"
    return _table(program, graph, best, f"memory={request.budget}", (note,))


def _checked(program: Program, graph: StepGraph, outcome: Outcome, request: MemoryRequest, whole: int) -> DecisionTable:
    """The table of a policy's outcome; with a budget beside the policy, the budget must hold."""
    policy = str(request.policy) if request.policy is not None else "save everything"
    if request.budget is not None:
        budget = _budget_bytes(request, whole + simulate(graph, KEEP_ALL).peak_bytes)
        limit = budget - whole - request.margin_bytes
        if outcome.peak_bytes > limit:
            message = _budget_message(program, graph, outcome, limit, whole)
            advice = f"; {policy} decides what is kept: leave checkpoint out and the planner decides"
            raise BudgetError(message + advice, outcome.peak_bytes + whole)
        return replace(_table(program, graph, outcome, policy, ()), budget_bytes=budget)
    return _table(program, graph, outcome, policy, ())


def _table(program: Program, graph: StepGraph, outcome: Outcome, policy: str, notes: tuple[str, ...]) -> DecisionTable:
    table = decision_table(program, graph, outcome, policy=policy, notes=notes)
    joined = program.decisions.joined(*table.rows, notes=notes)
    return DecisionTable(table.policy, joined.rows, table.phases, joined.notes)


def _budget_bytes(request: MemoryRequest, everything_bytes: int) -> int:
    """The budget of the whole step; ``everything_bytes``: what it takes when it keeps everything."""
    budget = request.budget
    assert budget is not None, "a budget is given"
    return int(everything_bytes * budget) if isinstance(budget, Fraction) else parse_bytes(budget, name="memory")


def _budget_message(program: Program, graph: StepGraph, smallest: Outcome, limit: int, whole: int) -> str:
    k = smallest.peak_at
    held = sorted(
        (
            (size, s)
            for s, size, birth, death in zip(
                smallest.content, smallest.storage_bytes, smallest.birth, smallest.death, strict=True
            )
            if 0 <= birth <= k <= death
        ),
        reverse=True,
    )
    largest = ", ".join(
        f"{graph.nodes[graph.value[s]].name} ({format_bytes(size)})" for size, s in held[:_LARGEST_SHOWN]
    )
    return (
        f"the budget of {format_bytes(limit + whole)} cannot be met: {format_bytes(whole)} rest between steps "
        f"(parameters, state, batch), and the smallest peak found above them is {format_bytes(smallest.peak_bytes)}, "
        f"at {graph.nodes[smallest.order.node[k]].name}, where the largest values are {largest or 'none'}. The "
        f"smallest feasible budget is {format_bytes(smallest.peak_bytes + whole)} ({smallest.peak_bytes + whole} bytes)"
    )
