"""Where the forward part can be cut so that little crosses the cut, and which late calls belong to each piece."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from graphopt.planner.step_graph import StepGraph

_WINDOW = 6
"""Calls to each side among which a cut must be the cheapest: shorter than half a transformer layer."""
_MOST_SEGMENTS = 192
_NEIGHBOURS = 3
_DEAREST = 1.5
"""A cut that so many times the bytes of a near one cross is no border between layers."""


@dataclass(frozen=True)
class Segments:
    """Pieces of the forward part.

    ``end[j]``: the last node of segment j (the last one ends with the forward part); ``of_storage[s]``: the segment
    that allocates storage s (-1: late or resident); ``late_until[j]``: the last late node that reads a value of segment
    j or of a later one, so that the late nodes behind it belong to earlier segments; ``borders[j]``: storages made in
    segment j that later segments read.
    """

    end: tuple[int, ...]
    of_storage: tuple[int, ...]
    late_until: tuple[int, ...]
    borders: tuple[frozenset[int], ...]

    @property
    def num(self) -> int:
        """How many segments there are."""
        return len(self.end)

    def of_early(self, i: int) -> int:
        """The segment of an early node."""
        return bisect_left(self.end, i)

    def of_late(self, i: int) -> int:
        """The segment whose backward part a late node belongs to: the last one that still has something to read."""
        for j in range(self.num - 1, 0, -1):
            if i <= self.late_until[j]:
                return j
        return 0

    def phase_starts(self) -> tuple[int, ...]:
        """The late nodes at which another segment's backward part begins, in order."""
        return tuple(sorted({until + 1 for until in self.late_until[1:] if until >= 0}))


def cut_segments(graph: StepGraph) -> Segments:
    """The Segments of ``graph``, cut where the bytes that cross are least."""
    return segments_at(graph, _cheapest_cuts(graph))


def segments_at(graph: StepGraph, cuts: tuple[int, ...]) -> Segments:
    """The Segments that end at the early nodes ``cuts`` (the last segment ends with the forward part)."""
    last = max(graph.first_late - 1, 0)
    end = tuple(dict.fromkeys((*(cut for cut in sorted(cuts) if cut < last), last)))
    of_storage = tuple(
        bisect_left(end, maker) if maker < graph.first_late and not graph.resident[s] else -1
        for s, maker in enumerate(graph.maker)
    )
    late_until = [-1] * len(end)
    borders: list[set[int]] = [set() for _ in end]
    for i in range(graph.num_nodes):
        for a in graph.arguments[i]:
            for s in graph.held[a]:
                j = of_storage[s]
                if j < 0:
                    continue
                if i >= graph.first_late:
                    late_until[j] = i
                elif bisect_left(end, i) > j:
                    borders[j].add(s)
    for j in range(len(end) - 2, -1, -1):
        late_until[j] = max(late_until[j], late_until[j + 1])
    return Segments(end, of_storage, tuple(late_until), tuple(frozenset(found) for found in borders))


def crossing_bytes(graph: StepGraph) -> list[int]:
    """For each early node, the bytes of forward values made up to it that forward calls behind it read."""
    last_read: dict[int, int] = {}
    for i in range(graph.first_late):
        for a in graph.arguments[i]:
            for s in graph.held[a]:
                if not graph.resident[s]:
                    last_read[s] = i
    changes = [0] * (graph.first_late + 1)
    for s, until in last_read.items():
        changes[graph.maker[s]] += graph.nbytes[s]
        changes[until] -= graph.nbytes[s]
    level, crossing = 0, []
    for change in changes[: graph.first_late]:
        level += change
        crossing.append(level)
    return crossing


def _cheapest_cuts(graph: StepGraph) -> tuple[int, ...]:
    calls = [i for i in range(graph.first_late) if graph.is_call[i]]
    crossing = crossing_bytes(graph)
    cuts: list[int] = []
    for position, i in enumerate(calls):
        around = [crossing[j] for j in calls[max(0, position - _WINDOW) : position + _WINDOW + 1]]
        # A view that follows the cheapest call leaves the same bytes crossing: one cut is enough.
        repeats = cuts and crossing[cuts[-1]] == crossing[i] and not graph.made[i]
        if crossing[i] == min(around) and not repeats:
            cuts.append(i)
    cheap = [
        cut
        for n, cut in enumerate(cuts)
        if crossing[cut]
        <= _DEAREST * min(crossing[near] for near in cuts[max(0, n - _NEIGHBOURS) : n + _NEIGHBOURS + 1])
    ]
    return _thinned(graph, cheap)


def _thinned(graph: StepGraph, cuts: list[int]) -> tuple[int, ...]:
    """At most so many cuts that planning stays fast, evenly over the cost of the forward part."""
    if len(cuts) <= _MOST_SEGMENTS:
        return tuple(cuts)
    total = sum(graph.seconds[: graph.first_late])
    kept: list[int] = []
    level, start = 0.0, 0
    for cut in cuts:
        level += sum(graph.seconds[start : cut + 1])
        start = cut + 1
        if level * _MOST_SEGMENTS >= total * (len(kept) + 1):
            kept.append(cut)
    return tuple(kept)
