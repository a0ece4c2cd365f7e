"""The cheapest set of values to keep when keeping has a price: an exact minimum cut.

Each forward call can be run again at its cost, each storage can be kept at its price; the late calls must find, or be
able to compute, all they read. The minimum of the sum over one more run of each call is a minimum s-t cut (the project
selection problem; Jain et al., "Checkmate", 2020, has the same without the cut). It knows no order and no peak: prices
stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from graphopt.planner.step_graph import StepGraph

_SOURCE, _SINK = 0, 1
# scipy's flow is in 32-bit integers; the sum of everything finite must stay below the capacity that stands for "never".
_NEVER = 2**30
_FINITE_SUM = 2**28


class MinCut:
    """The network of one graph, solved for many prices."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.storages = graph.early_storages()
        self.entry = {s: 2 + 2 * n for n, s in enumerate(self.storages)}
        calls = [i for i in range(graph.first_late) if graph.is_call[i] and graph.made[i] and not self._resident(i)]
        self.call = {i: 2 + 2 * len(self.storages) + n for n, i in enumerate(calls)}
        self.size = 2 + 2 * len(self.storages) + len(calls)
        self.fixed = self._fixed_edges()

    def _resident(self, i: int) -> bool:
        return all(self.graph.resident[s] for s in self.graph.made[i])

    def _fixed_edges(self) -> list[tuple[int, int]]:
        graph, edges = self.graph, []
        for i, call in self.call.items():
            edges += [(call, self.entry[s]) for s in graph.made[i] if s in self.entry]
            edges += [(self.entry[s] + 1, call) for s in self._read(i)]
        late = {s for i in range(graph.first_late, graph.num_nodes) for s in self._read(i)}
        edges += [(self.entry[s] + 1, _SINK) for s in sorted(late)]
        return sorted(set(edges))

    def _read(self, i: int) -> set[int]:
        return {s for a in self.graph.arguments[i] for s in self.graph.held[a] if s in self.entry}

    def dropped(self, prices: Sequence[float]) -> frozenset[int]:
        """The storages not to keep when keeping storage s costs ``prices[s]`` seconds."""
        graph = self.graph
        costs = {i: graph.seconds[i] for i in self.call if graph.repeatable[i]}
        total = sum(costs.values()) + sum(min(prices[s], 1e9) for s in self.storages)
        scale = _FINITE_SUM / total if total else 1.0
        edges = [(tail, head, _NEVER) for tail, head in self.fixed]
        for i, call in self.call.items():
            cost = 1 + int(costs[i] * scale) if i in costs else _NEVER
            edges.append((_SOURCE, call, cost))
        for s in self.storages:
            edges.append((self.entry[s], self.entry[s] + 1, 1 + int(prices[s] * scale)))
        rows, columns, capacities = zip(*edges, strict=True)
        network = coo_matrix((capacities, (rows, columns)), shape=(self.size, self.size), dtype=np.int32).tocsr()
        flow = maximum_flow(network, _SOURCE, _SINK).flow
        residual = (network - flow).tocsr()
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = set(breadth_first_order(residual, _SOURCE, return_predecessors=False).tolist())
        return frozenset(
            s
            for s in self.storages
            if graph.repeatable[graph.maker[s]] and not (self.entry[s] in reached and self.entry[s] + 1 not in reached)
        )
