"""Chooses an Item for every segment so that the peak stays below a limit at every moment, at the least cost.

Dynamic programming over the segments in order. What counts of the choices made so far is only how many bytes they keep
and what they cost, so a state is a Pareto list of those two; a segment's own peak is checked on top of what is kept
before it. Exact for the menu where segments only meet at what they keep (Beaumont et al., "Rotor", 2019, is the same
for one kind of item).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphopt.planner.menu import Item
from graphopt.planner.schedule import Choice
from graphopt.planner.segments import Segments

_MOST_STATES = 120

Numbers = NDArray[Any]


@dataclass(frozen=True)
class _Front:
    """Pareto states before one segment as arrays: what is kept, what it costs, and how each came about: the segment and
    the state before, and the item chosen there."""

    kept_bytes: Numbers
    seconds: Numbers
    segment: Numbers
    before: Numbers
    item: Numbers


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
    num = menu.segments.num
    arriving: list[list[_Front]] = [[] for _ in range(num + 1)]
    arriving[0].append(_front(np.zeros(1, np.int64), np.zeros(1), 0, np.zeros(1, np.int64), 0))
    fronts: list[_Front | None] = []
    for j in range(num + 1):
        front = _pareto(arriving[j]) if arriving[j] else None
        fronts.append(front)
        if front is None or j == num:
            continue
        for number, item in enumerate(menu.starting[j]):
            peak = item.peak_bytes + max(excess[item.start : item.end])
            # By rising bytes: those that leave room come first.
            fitting = int(np.searchsorted(front.kept_bytes, limit_bytes - peak, side="right"))
            if fitting:
                kept, seconds = front.kept_bytes[:fitting] + item.kept_bytes, front.seconds[:fitting] + item.seconds
                arriving[item.end].append(_front(kept, seconds, j, np.arange(fitting), number))
    return None if fronts[-1] is None else _chosen(menu, fronts)


def _front(kept: Numbers, seconds: Numbers, segment: int, before: Numbers, item: int) -> _Front:
    return _Front(kept, seconds, np.full(len(kept), segment), before, np.full(len(kept), item))


def combined(segments: Segments, items: Sequence[Item]) -> Choice:
    """The Choice that follows each item's plan in the segments that the item is about."""
    dropped: set[int] = set()
    renewed: set[int] = set()
    for item in items:
        own = {s for s in item.choice.dropped if item.start <= segments.of_storage[s] < item.end}
        dropped |= own
        renewed |= own & item.choice.renewed
    return Choice(frozenset(dropped), frozenset(renewed), segments.phase_starts() if renewed else ())


def _chosen(menu: Menu, fronts: list[_Front | None]) -> tuple[Item, ...]:
    """The items that lead to the cheapest of the last states: Pareto states are cheapest at the end."""
    j, items = len(fronts) - 1, []
    last = fronts[j]
    assert last is not None, "something leads to the end"
    state = len(last.seconds) - 1
    while j:
        front = fronts[j]
        assert front is not None, "every state follows one"
        j, state, number = int(front.segment[state]), int(front.before[state]), int(front.item[state])
        items.append(menu.starting[j][number])
    return tuple(items[::-1])


def _pareto(parts: list[_Front]) -> _Front:
    """States that no other beats in both bytes and seconds; evenly thinned when they are very many."""
    kept, seconds, segment, before, item = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("kept_bytes", "seconds", "segment", "before", "item")
    )
    order = np.lexsort((seconds, kept))
    least = np.minimum.accumulate(seconds[order])
    chosen = order[np.concatenate(([True], least[1:] < least[:-1]))]
    if len(chosen) > _MOST_STATES:
        step = len(chosen) / _MOST_STATES
        chosen = chosen[[*(int(n * step) for n in range(_MOST_STATES - 1)), len(chosen) - 1]]
    return _Front(kept[chosen], seconds[chosen], segment[chosen], before[chosen], item[chosen])


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
