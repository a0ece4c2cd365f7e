"""The minimum cut is the cheapest set of values to keep when keeping has a price."""

from __future__ import annotations

from itertools import combinations

import pytest

from benchmarks.plan_graphs import PlanGraph, chain, dense, encoder_decoder, transformer
from graphopt.planner.min_cut import MinCut

GRAPHS = (chain(6, seed=1), chain(7, seed=2, skip=3), encoder_decoder(2), dense(7), transformer(1, dropout=True))


def cost(graph: PlanGraph, dropped: frozenset[int], prices: list[float]) -> float:
    """Prices of what is kept, and one more run of all that must be computed for the late nodes."""
    needed, stack = set(), [a for i in range(graph.first_late, graph.num_nodes) for a in graph.arguments[i]]
    kept = set()
    while stack:
        i = stack.pop()
        if i >= graph.first_late or i in needed or i in kept:
            continue
        if i not in dropped:
            kept.add(i)
            continue
        needed.add(i)
        stack.extend(graph.arguments[i])
    return sum(prices[i] for i in kept) + sum(graph.micros[i] * 1e-6 for i in needed)


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.5, 4.0, 50.0])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_no_other_set_is_cheaper(graph, factor):
    unit = sum(graph.micros[: graph.first_late]) * 1e-6 / sum(graph.nbytes[: graph.first_late])
    prices = [factor * unit * size for size in graph.nbytes]
    found = MinCut(graph.step_graph()).dropped(prices)
    free = [i for i in range(graph.first_late) if i not in graph.fixed]
    subsets = (frozenset(chosen) for size in range(len(free) + 1) for chosen in combinations(free, size))
    least = min(cost(graph, dropped, prices) for dropped in subsets)
    # Prices are rounded to 2**28 parts of their sum, up to 4 of them at each node.
    assert cost(graph, found, prices) == pytest.approx(least, rel=1e-6)
    assert not found & graph.fixed
