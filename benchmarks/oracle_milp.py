"""The cheapest plan of a small graph as a mixed-integer program, solved by HiGHS: a second opinion on the first oracle.

Checkmate's formulation (Jain et al., 2020): ``run[t, i]`` says whether node i runs in stage t, ``kept[t, i]`` whether
its value is held from stage t - 1 on; node t runs first in stage t. ``held`` of event (t, k) and value i is at least 1
where the value is there and still needed while the event runs, and is otherwise free to be 0. Any number of copies.
"""

from __future__ import annotations

import highspy

from benchmarks.plan_graphs import PlanGraph


def solve_milp(graph: PlanGraph, limit_bytes: int, *, seconds: float = 60.0) -> int | None:
    """Microseconds of what runs again in the cheapest plan within ``limit_bytes``; None if no plan fits.

    Raises TimeoutError when neither is certain after ``seconds``.
    """
    model = highspy.Highs()
    model.silent()
    model.setOptionValue("time_limit", seconds)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_feasibility_tolerance", 1e-9)
    run, kept = _stages(model, graph)
    _memory(model, graph, limit_bytes, run, kept)
    again = [graph.micros[i] * run[t, i] for t, i in run if i < t]
    model.minimize(model.qsum(again))
    status = model.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise TimeoutError(f"HiGHS ended with {model.modelStatusToString(status)} after {seconds:.0f} s")
    return round(model.getInfo().objective_function_value)


Variables = dict[tuple[int, int], highspy.highs.highs_var]


def _stages(model: highspy.Highs, graph: PlanGraph) -> tuple[Variables, Variables]:
    """What runs and what is kept in each stage, and that everything read is there."""
    num = graph.num_nodes
    run: Variables = {}
    kept: Variables = {}
    for t in range(num):
        for i in range(t + 1):
            must, may = i == t, i == t or i not in graph.fixed
            run[t, i] = model.addVariable(int(must), int(may), type=highspy.HighsVarType.kInteger)
    for t in range(num + 1):
        for i in range(min(t, num)):
            must = i in graph.returned  # as it was made, not made again at the end
            kept[t, i] = model.addVariable(int(must), 1, type=highspy.HighsVarType.kInteger)
    for t in range(num):
        for i in range(t + 1):
            model.addConstr(kept[t + 1, i] <= run[t, i] + (kept[t, i] if i < t else 0))
            if i < t:
                model.addConstr(run[t, i] + kept[t, i] <= 1)
            for a in graph.arguments[i]:
                model.addConstr(run[t, i] <= run[t, a] + kept[t, a])
    return run, kept


def _memory(model: highspy.Highs, graph: PlanGraph, limit_bytes: int, run: Variables, kept: Variables) -> None:
    """At each event, what is there and needed fits."""
    readers: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for i, arguments in enumerate(graph.arguments):
        for a in arguments:
            readers[a].append(i)
    for t in range(graph.num_nodes):
        for k in range(t + 1):
            live = []
            for i in range(t + 1):
                there = (kept[t, i] if i < t else 0) + (run[t, i] if i <= k else 0)
                needs = [kept[t + 1, i], *(run[t, j] for j in readers[i] if k <= j <= t and j != i)]
                if i == k:
                    needs = [1]
                held = model.addVariable(0, 1)
                for need in needs:
                    model.addConstr(held >= there + need - 1)
                live.append(graph.nbytes[i] * held)
            model.addConstr(model.qsum(live) <= limit_bytes)
