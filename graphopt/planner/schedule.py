"""Which calls run again, and right before which call, when some values are dropped after the forward part.

Demand-driven: a dropped value is computed again right before the first late call that needs it, from values that are
there or are themselves computed again, in the order of the forward part. It then stays until its last use; a value in
``renewed`` stays only to the end of the phase, and is computed once more in the next phase that needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.planner.step_graph import StepGraph

ORIGINAL = -1
"""The copy number of a value as the program computes it; others are phase numbers."""


@dataclass(frozen=True)
class Choice:
    """What is decided about storages: those dropped after the forward part, those of them renewed in every phase, those
    of them that come back from host memory instead of being computed, and the late nodes at which phases begin."""

    dropped: frozenset[int] = frozenset()
    renewed: frozenset[int] = frozenset()
    phases: tuple[int, ...] = ()
    offloaded: frozenset[int] = frozenset()

    def phase_at(self, late: int) -> int:
        """The number of the phase that the late node belongs to."""
        return bisect_right(self.phases, late)


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
        self.twins: dict[tuple[int, int], int] = {}
        dropped, held = choice.dropped, graph.held
        self.is_gone = [
            graph.is_call[i] and i < graph.first_late and any(s in dropped for s in held[i])
            for i in range(graph.num_nodes)
        ]
        self.is_renewed = [
            self.is_gone[i] and any(s in choice.renewed for s in held[i]) for i in range(graph.num_nodes)
        ]

    def run_original(self, i: int) -> None:
        original = self.original
        self._append(i, tuple(original[a] for a in self.graph.arguments[i]), twin=False, anchor=i)

    def run_late(self, i: int) -> None:
        arguments = self.graph.arguments[i]
        if any(self.is_gone[a] for a in arguments):
            self._run_again(arguments, i)
        phase = self.choice.phase_at(i)
        self._append(i, tuple(self._entry(a, phase) for a in arguments), twin=False, anchor=i)

    def _entry(self, i: int, phase: int) -> int:
        return self.twins[self._key(i, phase)] if self.is_gone[i] else self.original[i]

    def _key(self, i: int, phase: int) -> tuple[int, int]:
        return (i, phase if self.is_renewed[i] else ORIGINAL)

    def _run_again(self, wanted: Sequence[int], anchor: int) -> None:
        phase = self.choice.phase_at(anchor)
        needed: set[int] = set()
        stack = [i for i in wanted if self.is_gone[i]]
        while stack:
            i = stack.pop()
            if i in needed or self._key(i, phase) in self.twins:
                continue
            needed.add(i)
            stack.extend(a for a in self._sources(i) if self.is_gone[a])
        for i in sorted(needed):
            arguments = tuple(self._entry(a, phase) for a in self._sources(i))
            self.twins[self._key(i, phase)] = len(self.node)
            self._append(i, arguments, twin=True, anchor=anchor)

    def _sources(self, i: int) -> tuple[int, ...]:
        """What a twin is computed from; what comes back from host memory is computed from nothing."""
        made = self.graph.made[i]
        return () if made and self.choice.offloaded.issuperset(made) else self.graph.arguments[i]

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
