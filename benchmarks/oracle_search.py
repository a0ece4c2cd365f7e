"""The cheapest plan of a tiny graph by exhaustive search: the judge of the other oracles."""

from __future__ import annotations

from heapq import heappop, heappush

from benchmarks.plan_graphs import PlanGraph

_State = tuple[int, int, frozenset[int]]


def search_optimum(graph: PlanGraph, limit_bytes: int) -> int | None:
    """Microseconds of what runs again in the cheapest plan within ``limit_bytes``, any number of copies; None if no
    plan fits.

    Dijkstra's algorithm over (stage, first node that may still run again in it, what is held). Anything may be let go
    of at any time, so a state also stands for all with less; what is held without a reader left is let go of at once.
    """
    start: _State = (0, 0, frozenset())
    best: dict[_State, int] = {start: 0}
    queue: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]
    while queue:
        cost, t, k, held_sorted = heappop(queue)
        held = frozenset(held_sorted)
        if best[t, k, held] < cost:
            continue
        if t == graph.num_nodes:
            return cost
        for more, state in _next(graph, limit_bytes, t, k, held):
            if cost + more < best.get(state, 1 << 60):
                best[state] = cost + more
                heappush(queue, (cost + more, state[0], state[1], tuple(sorted(state[2]))))
    return None


def _next(graph: PlanGraph, limit_bytes: int, t: int, k: int, held: frozenset[int]) -> list[tuple[int, _State]]:
    """What can be done: let go of one value, run the node of the stage, or run one again."""
    found: list[tuple[int, _State]] = [(0, (t, k, held - {i})) for i in held if i not in graph.returned]
    for i in range(k, t + 1):
        is_allowed = i == t or (i not in graph.fixed and i not in held)
        if not is_allowed or not held.issuperset(graph.arguments[i]):
            continue
        after = held | {i}
        if sum(graph.nbytes[n] for n in after) <= limit_bytes:
            found.append((0 if i == t else graph.micros[i], (t + 1, 0, after) if i == t else (t, i + 1, after)))
    return found
