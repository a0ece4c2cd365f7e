"""Chooses an Item for every segment so that the peak stays below a limit at every moment, at the least cost.

Dynamic programming over the segments in order. What counts of the choices made so far is only how many bytes they keep
and what they cost, so a state is a Pareto list of those two; a segment's own peak is checked on top of what is kept
before it. Exact for the menu where segments only meet at what they keep (Beaumont et al., "Rotor", 2019, is the same
for one kind of item).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphopt.planner.menu import Item
from graphopt.planner.schedule import Choice
from graphopt.planner.segments import Segments

_MOST_STATES = 120


@dataclass(frozen=True)
class _State:
    kept_bytes: int
    seconds: float
    before: _State | None = None
    item: Item | None = None


class Menu:
    """The Items of a graph, sorted by where they start."""

    def __init__(self, segments: Segments, items: Iterable[Item]) -> None:
        self.segments = segments
        starting: list[list[Item]] = [[] for _ in range(segments.num)]
        for item in items:
            starting[item.start].append(item)
        self.starting = [_undominated(found) for found in starting]


def choose(menu: Menu, limit_bytes: int, excess: Sequence[int]) -> tuple[Item, ...] | None:
    """The cheapest row of items whose peaks stay within ``limit_bytes``; None if no row does.

    ``excess[j]``: bytes by which the peak of segment j was found to exceed what its item says.
    """
    segments = menu.segments
    states: list[list[_State]] = [[] for _ in range(segments.num + 1)]
    states[0] = [_State(0, 0.0)]
    for j in range(segments.num):
        states[j] = _pareto(states[j])
        for state in states[j]:
            room = limit_bytes - state.kept_bytes
            for item in menu.starting[j]:
                if item.peak_bytes + max(excess[item.start : item.end]) <= room:
                    kept, seconds = state.kept_bytes + item.kept_bytes, state.seconds + item.seconds
                    states[item.end].append(_State(kept, seconds, before=state, item=item))
    if not states[-1]:
        return None
    best = min(states[-1], key=lambda state: (state.seconds, state.kept_bytes))
    return tuple(_chosen(best))


def combined(segments: Segments, items: Sequence[Item]) -> Choice:
    """The Choice that follows each item's plan in the segments that the item is about."""
    dropped: set[int] = set()
    renewed: set[int] = set()
    for item in items:
        own = {s for s in item.choice.dropped if item.start <= segments.of_storage[s] < item.end}
        dropped |= own
        renewed |= own & item.choice.renewed
    return Choice(frozenset(dropped), frozenset(renewed), segments.phase_starts() if renewed else ())


def _chosen(state: _State) -> list[Item]:
    items = []
    while state.before is not None:
        assert state.item is not None, "every state but the first follows an item"
        items.append(state.item)
        state = state.before
    return items[::-1]


def _pareto(states: list[_State]) -> list[_State]:
    """States that no other beats in both bytes and seconds; evenly thinned when they are very many."""
    found: list[_State] = []
    for state in sorted(states, key=lambda state: (state.kept_bytes, state.seconds)):
        if not found or state.seconds < found[-1].seconds:
            found.append(state)
    if len(found) <= _MOST_STATES:
        return found
    step = len(found) / _MOST_STATES
    return [found[int(n * step)] for n in range(_MOST_STATES - 1)] + [found[-1]]


def _undominated(items: list[Item]) -> list[Item]:
    def figures(item: Item) -> tuple[int, int, int, float]:
        return (item.end, item.kept_bytes, item.peak_bytes, item.seconds)

    unique = list({figures(item): item for item in reversed(items)}.values())
    return [
        item
        for item in unique
        if not any(
            other is not item
            and other.end == item.end
            and other.kept_bytes <= item.kept_bytes
            and other.peak_bytes <= item.peak_bytes
            and other.seconds <= item.seconds
            for other in unique
        )
    ]
