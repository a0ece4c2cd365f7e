"""Whole plans of very different kinds, and what each asks of every segment: the menu that the chain chooses from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from graphopt.planner.min_cut import MinCut
from graphopt.planner.schedule import KEEP_ALL, Choice
from graphopt.planner.segments import Segments
from graphopt.planner.simulate import Outcome, simulate
from graphopt.planner.step_graph import StepGraph

# Prices of keeping everything, in units of the forward part's cost: from "drop what is nearly free" to "keep nothing".
_PRICES = (0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 25.0, 100.0)
_GROUPS = (2, 3, 4, 6, 8, 12, 16)
_GROUP_PRICES = (3.0, 6.0, 25.0)
_LARGE_GRAPH = 6_000
"""Nodes from which on every other plan of the menu is left out: one simulation takes 0.1 s there."""
_BORDER_DISCOUNT = 1e-3
"""What keeping the border of a group costs against other values: it bounds how far a chain of recomputation reaches."""


@dataclass(frozen=True)
class Item:
    """What one plan asks of segments ``start`` to ``end`` (exclusive), above what earlier segments keep.

    ``kept_bytes``: held from their forward to their backward part; ``peak_bytes``: the most that is held while they
    run, forward or backward; ``seconds``: what runs again of them; ``choice``: the plan.
    """

    start: int
    end: int
    kept_bytes: int
    peak_bytes: int
    seconds: float
    choice: Choice


def plans(graph: StepGraph, segments: Segments) -> Iterator[tuple[Choice, int]]:
    """Choices, each with the number of segments that make one of its groups."""
    yield KEEP_ALL, 1
    cut = MinCut(graph)
    early = graph.early_storages()
    total_bytes = sum(graph.nbytes[s] for s in early) or 1
    unit = sum(graph.seconds[: graph.first_late]) / total_bytes
    step = 2 if graph.num_nodes > _LARGE_GRAPH else 1
    for factor in _PRICES[::step]:
        prices = [factor * unit * size for size in graph.nbytes]
        yield Choice(cut.dropped(prices)), 1
        for s in set().union(*segments.borders):
            prices[s] *= _BORDER_DISCOUNT
        yield Choice(cut.dropped(prices)), 1
    for group in (group for group in _GROUPS[::step] if group * 2 <= segments.num):
        for factor in _GROUP_PRICES[::step]:
            dropped = _dropped_in_groups(cut, graph, segments, group, factor * unit)
            yield Choice(dropped), group
            inner = frozenset().union(*segments.borders) & dropped
            yield Choice(dropped, dropped - inner, segments.phase_starts()), group


def _dropped_in_groups(cut: MinCut, graph: StepGraph, segments: Segments, group: int, price: float) -> frozenset[int]:
    """What to drop when only the borders of every ``group`` segments are meant to be kept."""
    prices = [price * size for size in graph.nbytes]
    for j, border in enumerate(segments.borders):
        is_outer = (j + 1) % group == 0
        for s in border:
            prices[s] *= _BORDER_DISCOUNT if is_outer else 1.0
    dropped = set(cut.dropped(prices))
    for j, border in enumerate(segments.borders):
        if (j + 1) % group:
            dropped |= {s for s in border if graph.repeatable[graph.maker[s]]}
    return frozenset(dropped)


def items_of(graph: StepGraph, segments: Segments, outcome: Outcome, group: int) -> tuple[Item, ...]:
    """The Items of one simulated plan, one for each of its groups."""
    kept = kept_by_segment(graph, segments, outcome)
    before = [0, *accumulate(kept)]
    peaks = peaks_by_segment(graph, segments, outcome)
    peaks = [max(peak, kept) for peak, kept in zip(peaks, before, strict=False)]
    seconds = _seconds(graph, segments, outcome)
    found = []
    for start in range(0, segments.num, group):
        end = min(start + group, segments.num)
        peak = max(peaks[j] - before[start] for j in range(start, end))
        found.append(Item(start, end, before[end] - before[start], peak, sum(seconds[start:end]), outcome.choice))
    return tuple(found)


def kept_by_segment(graph: StepGraph, segments: Segments, outcome: Outcome) -> list[int]:
    """Bytes of each segment's values that are there when the backward part begins."""
    first_late = next(
        (
            k
            for k, i in enumerate(outcome.order.node)
            if (graph.is_call[i] and i >= graph.first_late) or outcome.order.is_twin[k]
        ),
        len(outcome.order.node),
    )
    kept = [0] * segments.num
    for s, size, birth, death in zip(outcome.content, outcome.storage_bytes, outcome.birth, outcome.death, strict=True):
        j = segments.of_storage[s]
        if j >= 0 and 0 <= birth < first_late <= death:
            kept[j] += size
    return kept


def peaks_by_segment(graph: StepGraph, segments: Segments, outcome: Outcome) -> list[int]:
    """The most that is held while each segment runs, forward or backward, with what all others hold then."""
    peaks = [0] * segments.num
    order = outcome.order
    segment_of: dict[int, int] = {}
    for k, live in enumerate(outcome.live):
        i = order.node[k]
        if not graph.is_call[i]:
            continue
        place = order.anchor[k] if order.is_twin[k] else i
        if place not in segment_of:
            segment_of[place] = segments.of_early(i) if i < graph.first_late else segments.of_late(place)
        j = segment_of[place]
        if live > peaks[j]:
            peaks[j] = live
    return peaks


def _seconds(graph: StepGraph, segments: Segments, outcome: Outcome) -> list[float]:
    seconds = [0.0] * segments.num
    for i, twin in zip(outcome.order.node, outcome.order.is_twin, strict=True):
        if twin:
            seconds[segments.of_early(i)] += graph.seconds[i]
    return seconds


def simulated_menu(graph: StepGraph, segments: Segments) -> tuple[list[Outcome], list[Item]]:
    """Every plan of the menu simulated, and the Items of all of them."""
    outcomes: list[Outcome] = []
    items: list[Item] = []
    seen: set[Choice] = set()
    for choice, group in plans(graph, segments):
        if choice in seen:
            continue
        seen.add(choice)
        outcome = simulate(graph, choice)
        outcomes.append(outcome)
        items += items_of(graph, segments, outcome, group)
    return outcomes, items
