"""The cheapest plan of a small graph, proven by CP-SAT: each value is held during up to so many retention intervals.

Nodes run first in their own order, one a stage. Before node t of the order, any nodes before it may run again, in
ascending order: node i in stage t is event ``t * (t + 1) / 2 + i``. A copy of a value lives from its event to its last
reader's; what lives during an event must fit (Bartan et al., "MOCCASIN", 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from benchmarks.plan_graphs import PlanGraph


@dataclass(frozen=True)
class Proof:
    """``micros``: cost of what runs again in the best plan found (None: none was found); ``bound``: no plan with so
    many copies costs less; ``is_proven``: the two are equal, or it is certain that there is no plan."""

    micros: int | None
    bound: int
    is_proven: bool

    @property
    def is_infeasible(self) -> bool:
        """Whether it is certain that no plan with so many copies fits."""
        return self.is_proven and self.micros is None


def event(t: int, i: int) -> int:
    """The number of node ``i`` in the stage of node ``t``."""
    return t * (t + 1) // 2 + i


def prove_optimum(
    graph: PlanGraph,
    limit_bytes: int,
    *,
    copies: int = 3,
    known: int | None = None,
    seconds: float = 30.0,
    anywhere: bool = True,
) -> Proof:
    """The Proof for ``graph`` within ``limit_bytes``; ``known``: the cost of a plan that exists; ``anywhere``: whether
    any node may run again at any time, or forward nodes in the backward part alone, as the planner has it."""
    model = _Model(graph, limit_bytes, copies, anywhere=anywhere)
    if known is not None:
        model.solver_model.add(model.cost <= known)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model.solver_model)
    if status == cp_model.INFEASIBLE:
        return Proof(None, known or 0, True)
    bound = max(0, round(solver.best_objective_bound))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(round(solver.objective_value), bound, status == cp_model.OPTIMAL)
    return Proof(None, bound, False)


class _Model:
    def __init__(self, graph: PlanGraph, limit_bytes: int, copies: int, *, anywhere: bool) -> None:
        self.graph = graph
        self.solver_model = cp_model.CpModel()
        self.last = event(graph.num_nodes - 1, graph.num_nodes - 1)
        self.start: dict[tuple[int, int], cp_model.IntVar | int] = {}
        self.end: dict[tuple[int, int], cp_model.IntVar] = {}
        self.active: dict[tuple[int, int], cp_model.IntVar | int] = {}
        intervals = []
        for i in range(graph.num_nodes):
            first = i + 1 if anywhere else max(i + 1, graph.first_late)
            is_free = i not in graph.fixed and (anywhere or i < graph.first_late)
            stages = range(first, graph.num_nodes) if is_free else range(0)
            for c in range(copies if len(stages) else 1):
                intervals.append(self._copy(i, c, [event(t, i) for t in stages]))
        self.solver_model.add_cumulative(intervals, [graph.nbytes[i] for i, _ in self.start], limit_bytes)
        for key in self.start:
            for a in graph.arguments[key[0]]:
                self._read(key, a)
        self._used()
        self.cost = sum(graph.micros[i] * self.active[i, c] for i, c in self.start if c)
        self.solver_model.minimize(self.cost)

    def _copy(self, i: int, c: int, starts: list[int]) -> cp_model.IntervalVar:
        model, key = self.solver_model, (i, c)
        first = event(i, i)
        lowest = self.last if i in self.graph.returned and not c else first
        self.end[key] = model.new_int_var(lowest, self.last, f"end {key}")
        size = model.new_int_var(1, self.last + 1, f"size {key}")
        if not c:
            self.start[key], self.active[key] = first, 1
            return model.new_interval_var(first, size, self.end[key] + 1, f"{key}")
        start = model.new_int_var_from_domain(cp_model.Domain.from_values(starts), f"start {key}")
        active = model.new_bool_var(f"active {key}")
        self.start[key], self.active[key] = start, active
        if c > 1:
            model.add_implication(active, self.active[i, c - 1])  # type: ignore[arg-type]
            model.add(start > self.start[i, c - 1]).only_enforce_if(active)
        return model.new_optional_interval_var(start, size, self.end[key] + 1, active, f"{key}")

    def _read(self, reader: tuple[int, int], a: int) -> None:
        """``reader``, if it runs, reads one copy of node ``a`` that is there."""
        model, sources = self.solver_model, []
        for key in ((a, c) for c in range(len(self.start)) if (a, c) in self.start):
            reads = model.new_bool_var(f"{reader} reads {key}")
            if key[1]:
                model.add_implication(reads, self.active[key])  # type: ignore[arg-type]
                model.add(self.start[key] < self.start[reader]).only_enforce_if(reads)
            model.add(self.end[key] >= self.start[reader]).only_enforce_if(reads)
            self.readers.setdefault(key, []).append(reads)
            sources.append(reads)
        model.add(sum(sources) == self.active[reader])

    @property
    def readers(self) -> dict[tuple[int, int], list[cp_model.IntVar]]:
        """Who may read each copy."""
        return self.__dict__.setdefault("_readers", {})

    def _used(self) -> None:
        """A copy that nobody reads is not made."""
        for key, active in self.active.items():
            if key[1]:
                self.solver_model.add_bool_or([*self.readers.get(key, []), active.negated()])  # type: ignore[union-attr]
