"""Every plan that was found for a graph: peak against seconds. What a budget gets is read off it.

The plans depend on the graph alone, never on the budget that is asked for: a larger budget chooses among more of the
same plans, so its step is never slower, and every process finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from graphopt.planner.chain import Menu, choose, combined
from graphopt.planner.local_search import LARGEST_GRAPH, LocalSearch
from graphopt.planner.menu import kept_by_segment, peaks_by_segment, simulated_menu
from graphopt.planner.polish import polish
from graphopt.planner.segments import Segments, cut_segments
from graphopt.planner.simulate import Outcome, simulate, undominated
from graphopt.planner.step_graph import StepGraph

# Nodes times rungs; a rung takes about 5 simulations, of 6 us a node.
_EFFORT = 120_000
_FEWEST_RUNGS, _MOST_RUNGS = 8, 200
_CORRECTIONS = 4


@dataclass(frozen=True)
class Frontier:
    """Plans that no other beats in both peak and seconds, from the smallest peak to the cheapest."""

    outcomes: tuple[Outcome, ...]

    @property
    def smallest_peak(self) -> int:
        """The least bytes above the resident ones that any plan found needs."""
        return self.outcomes[0].peak_bytes

    def best(self, limit_bytes: int) -> Outcome | None:
        """The cheapest plan whose peak is within ``limit_bytes``."""
        return next((found for found in reversed(self.outcomes) if found.peak_bytes <= limit_bytes), None)


def search_frontier(graph: StepGraph) -> Frontier:
    """The Frontier of ``graph``."""
    segments = cut_segments(graph)
    outcomes, items = simulated_menu(graph, segments)
    menu = Menu(segments, items)
    excess = [0] * segments.num  # what one rung learns of the items, the next one knows
    for limit in _rungs(graph, outcomes):
        outcomes += _search(graph, segments, menu, limit, excess)
        best = Frontier(tuple(undominated(outcomes))).best(limit)
        if best is not None and best.seconds:
            outcomes.append(polish(graph, best, limit))
    if graph.num_nodes <= LARGEST_GRAPH:
        outcomes = LocalSearch(graph, outcomes).run()
    return Frontier(tuple(undominated(outcomes)))


def _rungs(graph: StepGraph, outcomes: list[Outcome]) -> list[int]:
    """Limits from the peak of keeping everything down to below the smallest peak of the menu: half of them at equal
    distances, half at equal ratios, which lie closer together where memory is tight."""
    top = outcomes[0].peak_bytes
    low = int(0.8 * min(found.peak_bytes for found in outcomes))
    num = max(_FEWEST_RUNGS, min(_EFFORT // graph.num_nodes, _MOST_RUNGS))
    shares = [n / (num // 2) for n in range(1, num // 2 + 1)]
    distances = {top - int((top - low) * share) for share in shares}
    ratios = {int(top * (low / top) ** share) for share in shares} if low else set()
    return sorted(distances | ratios, reverse=True)


def _search(graph: StepGraph, segments: Segments, menu: Menu, limit: int, excess: list[int]) -> list[Outcome]:
    """What the chain proposes for ``limit``, corrected by what simulation finds until it fits."""
    found: list[Outcome] = []
    for _ in range(_CORRECTIONS):
        row = choose(menu, limit, excess)
        if row is None and any(excess):
            excess[:] = [0] * len(excess)  # what was learned of other items forbids too much here
            row = choose(menu, limit, excess)
        if row is None:
            break
        outcome = simulate(graph, combined(segments, row))
        found.append(outcome)
        if outcome.peak_bytes <= limit:
            break
        kept = [0, *accumulate(kept_by_segment(graph, segments, outcome))]
        actual = peaks_by_segment(graph, segments, outcome)
        for item in row:
            over = max(actual[item.start : item.end]) - kept[item.start] - item.peak_bytes
            for j in range(item.start, item.end):
                excess[j] = max(over, 0)
    return found
