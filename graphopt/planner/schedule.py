"""Which calls run again, and right before which call, when some values are dropped after the forward part.

Demand-driven: a dropped value is computed again right before the first late call that needs it, from values that are
there or are themselves computed again, in the order of the forward part. It then stays until its last use; a value in
``renewed`` stays only to the end of the phase, and is computed once more in the next phase that needs it. ``cuts`` says
the same of one value more finely: late calls up to the first cut read the value as it was made, those from one cut to
the next share a copy. Every way to run forward calls again in the backward part is a set of cuts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.planner.step_graph import StepGraph


@dataclass(frozen=True)
class Choice:
    """What is decided about storages: those dropped after the forward part, those of them renewed in every phase, and
    the late nodes at which phases begin (in order). ``cuts``: (storage, late nodes in order) of dropped storages whose
    copies begin at nodes of their own. ``offloaded``: dropped storages that come back from host memory instead of being
    computed."""

    dropped: frozenset[int] = frozenset()
    renewed: frozenset[int] = frozenset()
    phases: tuple[int, ...] = ()
    cuts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    offloaded: frozenset[int] = frozenset()

    def cuts_by_storage(self, first_late: int) -> dict[int, tuple[int, ...]]:
        """The cuts of every dropped storage."""
        in_phases = (first_late, *(phase for phase in self.phases if phase > first_late))
        found = {s: in_phases if s in self.renewed else (first_late,) for s in self.dropped}
        return found | dict(self.cuts)

    def brings_back(self, made: tuple[int, ...]) -> bool:
        """Whether all that a call makes, if anything, comes back from host memory instead of being computed."""
        return bool(made) and self.offloaded.issuperset(made)

    def keeping(self, storages: frozenset[int]) -> Choice:
        """This choice with ``storages`` kept."""
        cuts = tuple((s, places) for s, places in self.cuts if s not in storages)
        return Choice(self.dropped - storages, self.renewed - storages, self.phases, cuts, self.offloaded - storages)

    @classmethod
    def of_cuts(cls, cuts: dict[int, tuple[int, ...]]) -> Choice:
        """The choice with exactly these cuts."""
        places = tuple(sorted((s, found) for s, found in cuts.items() if found))
        return cls(frozenset(s for s, _ in places), cuts=places)


KEEP_ALL = Choice()


@dataclass(frozen=True)
class Schedule:
    """Calls in the order they run, inputs first. ``node[k]``: which node runs; ``arguments[k]``: which earlier entries
    it reads; ``is_twin[k]``: whether it runs again; ``anchor[k]``: the late node a twin stands before (else itself)."""

    node: Sequence[int]
    arguments: Sequence[tuple[int, ...]]
    is_twin: Sequence[bool]
    anchor: Sequence[int]


def schedule(graph: StepGraph, choice: Choice) -> Schedule:
    """The Schedule of ``graph`` under ``choice``; calls that end up without users are left out."""
    building = _Building(graph, choice)
    for i in range(graph.num_nodes):
        if i < graph.first_late or not graph.is_call[i]:
            building.run_original(i)
        else:
            building.run_late(i)
    return _without_dead(graph, building)


class _Building:
    def __init__(self, graph: StepGraph, choice: Choice) -> None:
        self.graph = graph
        self.choice = choice
        self.node: list[int] = []
        self.arguments: list[tuple[int, ...]] = []
        self.is_twin: list[bool] = []
        self.anchor: list[int] = []
        self.original: list[int] = [-1] * graph.num_nodes
        self.twins: dict[tuple[int, tuple[int, ...]], int] = {}
        cuts = choice.cuts_by_storage(graph.first_late)
        self.cuts: list[tuple[tuple[int, ...], ...]] = [()] * graph.num_nodes
        for i in range(graph.first_late):
            if graph.is_call[i]:
                self.cuts[i] = tuple(cuts[s] for s in graph.held[i] if s in cuts)

    def run_original(self, i: int) -> None:
        original = self.original
        self._append(i, tuple(original[a] for a in self.graph.arguments[i]), twin=False, anchor=i)

    def run_late(self, i: int) -> None:
        arguments = self.graph.arguments[i]
        if any(self.cuts[a] for a in arguments):
            self._run_again(arguments, i)
        self._append(i, tuple(self._entry(a, i) for a in arguments), twin=False, anchor=i)

    def _copy(self, i: int, late: int) -> tuple[int, ...]:
        """Which copy of node ``i`` is read at the late node ``late``, by number for each storage it holds that has
        cuts; empty for the node as the forward part runs it."""
        copy = tuple(bisect_right(places, late) for places in self.cuts[i])
        return copy if any(copy) else ()

    def _entry(self, i: int, late: int) -> int:
        copy = self._copy(i, late) if self.cuts[i] else ()
        return self.twins[i, copy] if copy else self.original[i]

    def _run_again(self, wanted: Sequence[int], anchor: int) -> None:
        needed: dict[int, tuple[int, ...]] = {}
        stack = [i for i in wanted if self.cuts[i]]
        while stack:
            i = stack.pop()
            copy = self._copy(i, anchor)
            if not copy or i in needed or (i, copy) in self.twins:
                continue
            needed[i] = copy
            stack.extend(a for a in self._sources(i) if self.cuts[a])
        for i in sorted(needed):
            arguments = tuple(self._entry(a, anchor) for a in self._sources(i))
            self.twins[i, needed[i]] = len(self.node)
            self._append(i, arguments, twin=True, anchor=anchor)

    def _sources(self, i: int) -> tuple[int, ...]:
        """What a twin is computed from; what comes back from host memory is computed from nothing."""
        return () if self.choice.brings_back(self.graph.made[i]) else self.graph.arguments[i]

    def _append(self, i: int, arguments: tuple[int, ...], *, twin: bool, anchor: int) -> None:
        if not twin:
            self.original[i] = len(self.node)
        self.node.append(i)
        self.arguments.append(arguments)
        self.is_twin.append(twin)
        self.anchor.append(anchor)


def _without_dead(graph: StepGraph, building: _Building) -> Schedule:
    """The entries that something uses, that leave the program, or that must run anyway."""
    num = len(building.node)
    used = bytearray(num)
    update_values = {value for value, _ in graph.writes}
    for k in range(num - 1, -1, -1):
        i = building.node[k]
        is_root = not building.is_twin[k] and (
            not graph.is_call[i] or i in graph.returned or i in update_values or not graph.repeatable[i]
        )
        if is_root or used[k]:
            used[k] = 1
            for a in building.arguments[k]:
                used[a] = 1
    if all(used):
        return Schedule(building.node, building.arguments, building.is_twin, building.anchor)
    place = [0] * num
    kept = [k for k in range(num) if used[k]]
    for position, k in enumerate(kept):
        place[k] = position
    return Schedule(
        [building.node[k] for k in kept],
        [tuple(place[a] for a in building.arguments[k]) for k in kept],
        [building.is_twin[k] for k in kept],
        [building.anchor[k] for k in kept],
    )
