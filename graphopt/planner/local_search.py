"""Improves the plans of a small graph cut by cut, on the simulator.

For one limit at a time: cuts are added where most bytes beyond the limit go for the least time, until it holds; cuts
that are not needed are taken back; then each cut in turn is taken back even if it is needed, and the plan repaired
without it. Every plan met on the way counts, not only the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from graphopt.planner.schedule import Choice
from graphopt.planner.simulate import Outcome, simulate, undominated
from graphopt.planner.step_graph import StepGraph

LARGEST_GRAPH = 160
"""Nodes up to which single cuts are searched; beyond, a segment of the menu is the unit."""
# Simulations times nodes: 4 s on one core at 6 us a node.
_EFFORT = 600_000
_LEVELS = 4
_MOST_REPAIRS = 40
_FREE_SECONDS = 1e-9
"""What a move that costs nothing counts as, so that moves compare by what they free."""

Cuts = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Tried:
    """A set of cuts and what the simulator says of it. ``excess``: bytes beyond the limit, summed over all calls."""

    cuts: Cuts
    outcome: Outcome
    excess: int

    @property
    def seconds(self) -> float:
        return self.outcome.seconds


class LocalSearch:
    """The search in one graph; ``found`` holds every plan that no other found one beats."""

    def __init__(self, graph: StepGraph, outcomes: list[Outcome]) -> None:
        self.graph = graph
        self.found = undominated(outcomes)
        self.left = _EFFORT // max(graph.num_nodes, 1)
        self.seen: dict[Choice, Outcome] = {}
        # The other end of the scale: nothing is held for longer than one late call needs it.
        early = frozenset(s for s in graph.early_storages() if graph.repeatable[graph.maker[s]])
        late = tuple(i for i in range(graph.first_late, graph.num_nodes) if graph.is_call[i])
        self.renewed = simulate(graph, Choice(early, early, late))

    def run(self) -> list[Outcome]:
        """Plans for limits all over the range of peaks, the coarse division of it first."""
        top = max(outcome.peak_bytes for outcome in self.found)
        low = min(self._lowest(), *(outcome.peak_bytes for outcome in self.found))
        for share in _divisions():
            if self.left <= 0:
                break
            self._improve(low + int((top - low) * share))
        for num_taken in (1, 2):
            for outcome, next_one in pairwise(list(self.found)):
                self._exchange_at(outcome, next_one.peak_bytes - 1, num_taken)
        return self.found

    def _exchange_at(self, outcome: Outcome, limit: int, num_taken: int) -> None:
        """Look for plans within ``limit`` that are cheaper than ``outcome``, taking back so many cuts at once."""
        best: _Tried | None = self._tried(_cuts_that_act(self.graph, outcome), limit)
        while best is not None and self.left > 0:
            best = self._exchanged(best, limit, num_taken)

    def _lowest(self) -> int:
        """Bytes that some original call needs by itself, whatever else is dropped."""
        graph = self.graph
        return max(
            sum(
                graph.nbytes[s]
                for s in {s for n in (i, *graph.arguments[i]) for s in graph.held[n]}
                if not graph.resident[s]
            )
            for i in range(graph.num_nodes)
        )

    def _improve(self, limit: int) -> None:
        best = None
        for start in self._starts(limit):
            reached = self._repaired(start, limit, banned=frozenset())
            if reached is not None:
                reached = self._relaxed(reached, limit)
                best = reached if best is None or reached.seconds < best.seconds else best
        while best is not None and self.left > 0:
            better = self._exchanged(best, limit)
            if better is None:
                return
            best = better

    def _starts(self, limit: int) -> list[_Tried]:
        """The cheapest plan within the limit, and the one just beyond it."""
        within = [outcome for outcome in self.found if outcome.peak_bytes <= limit]
        beyond = [outcome for outcome in self.found if outcome.peak_bytes > limit]
        chosen = [*within[-1:], *beyond[:1], *beyond[-1:], self.renewed]
        return [self._tried(_cuts_that_act(self.graph, outcome), limit) for outcome in chosen]

    def _exchanged(self, best: _Tried, limit: int, num_taken: int = 1) -> _Tried | None:
        """A cheaper plan that lacks ``num_taken`` cuts of ``best``."""
        there = [(s, place) for s, places in sorted(best.cuts.items()) for place in places]
        for taken in combinations(there, num_taken):
            if self.left <= 0:
                return None
            cuts = best.cuts
            for s, place in taken:
                cuts = _toggled(cuts, s, place)
            without = self._tried(cuts, limit)
            if without.seconds >= best.seconds:
                continue
            for thrifty in (True, False):
                repaired = self._repaired(without, limit, banned=frozenset(taken), below=best.seconds, thrifty=thrifty)
                relaxed = None if repaired is None else self._relaxed(repaired, limit)
                if relaxed is not None and relaxed.seconds < best.seconds:
                    return relaxed
        return None

    def _repaired(
        self,
        tried: _Tried,
        limit: int,
        *,
        banned: frozenset[tuple[int, int]],
        below: float = float("inf"),
        thrifty: bool = True,
    ) -> _Tried | None:
        """``tried`` with cuts changed until nothing exceeds the limit; None if that leads nowhere or costs too much.

        ``thrifty``: each time the change that frees most for its time, otherwise the one that frees most.
        """
        for _ in range(_MOST_REPAIRS):
            if not tried.excess:
                return tried
            options = [
                option
                for s, place in self._moves(tried, limit)
                if (s, place) not in banned and self.left > 0
                if (option := self._tried(_toggled(tried.cuts, s, place), limit)).excess < tried.excess
                if option.seconds < below
            ]
            if not options:
                return None
            tried = max(options, key=lambda option: self._worth(tried, option) if thrifty else -option.excess)
        return None

    def _worth(self, tried: _Tried, option: _Tried) -> float:
        """Bytes beyond the limit that go for a second."""
        paid = max(option.seconds - tried.seconds, _FREE_SECONDS)
        return (tried.excess - option.excess) / paid

    def _relaxed(self, tried: _Tried, limit: int) -> _Tried:
        """``tried`` without cuts that it holds the limit without, those of dear calls first."""
        cost = self.graph.seconds
        while self.left > 0:
            before = tried
            there = [(s, place) for s, places in tried.cuts.items() for place in places]
            for s, place in sorted(there, key=lambda cut: (-cost[self.graph.maker[cut[0]]], cut)):
                option = self._tried(_toggled(tried.cuts, s, place), limit)
                if not option.excess and option.seconds <= tried.seconds:
                    tried = option
            if tried is before:
                return tried
        return tried

    def _moves(self, tried: _Tried, limit: int) -> list[tuple[int, int]]:
        """Cuts to add or take back, of values that are held where the limit is exceeded."""
        outcome, graph = tried.outcome, self.graph
        order = outcome.order
        beyond = [k for k, live in enumerate(outcome.live) if live > limit]
        held = {
            s
            for s, birth, death in zip(outcome.content, outcome.birth, outcome.death, strict=True)
            if birth >= 0 and any(birth <= k <= death for k in beyond)
        }
        moves: set[tuple[int, int]] = set()
        for k, arguments in enumerate(order.arguments):
            late = order.anchor[k]
            if late < graph.first_late:
                continue
            for a in arguments:
                i = order.node[a]
                if graph.is_call[i] and i < graph.first_late:
                    moves.update((s, late) for s in graph.held[i] if s in held and graph.repeatable[graph.maker[s]])
        moves.update((s, place) for s, places in tried.cuts.items() for place in places)
        return sorted(move for move in moves if not graph.resident[move[0]])

    def _tried(self, cuts: Cuts, limit: int) -> _Tried:
        choice = Choice.of_cuts(cuts)
        outcome = self.seen.get(choice)
        if outcome is None:
            self.left -= 1
            outcome = self.seen[choice] = simulate(self.graph, choice)
            self.found = _with(self.found, outcome)
        return _Tried(cuts, outcome, sum(live - limit for live in outcome.live if live > limit))


def _cuts_that_act(graph: StepGraph, outcome: Outcome) -> Cuts:
    """The late calls before which each value is computed again, which say the same as the choice of ``outcome``."""
    found: dict[int, set[int]] = {}
    for i, twin, anchor in zip(outcome.order.node, outcome.order.is_twin, outcome.order.anchor, strict=True):
        for s in graph.made[i] if twin else ():
            if s in outcome.choice.dropped:
                found.setdefault(s, set()).add(anchor)
    return {s: tuple(sorted(places)) for s, places in sorted(found.items())}


def _toggled(cuts: Cuts, s: int, place: int) -> Cuts:
    """``cuts`` with the cut of ``s`` at ``place`` added, or taken back if it is there."""
    places = cuts.get(s, ())
    changed = tuple(p for p in places if p != place) if place in places else tuple(sorted((*places, place)))
    return {**{t: found for t, found in cuts.items() if t != s}, **({s: changed} if changed else {})}


def _divisions() -> Iterator[float]:
    """0, 1/2, 1/4, 3/4, 1/8, 3/8, ...: the range divided ever more finely."""
    yield 0.0
    for level in range(1, _LEVELS + 1):
        yield from (n / 2**level for n in range(1, 2**level, 2))


def _with(found: list[Outcome], outcome: Outcome) -> list[Outcome]:
    """``found`` (by rising peak) with ``outcome``, unless it is beaten."""
    if any(o.peak_bytes <= outcome.peak_bytes and o.seconds <= outcome.seconds for o in found):
        return found
    return undominated([*found, outcome])
