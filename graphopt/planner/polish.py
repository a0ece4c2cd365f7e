"""Keeps dropped values again where there is room for them at every moment they would live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphopt.planner.simulate import Outcome, simulate
from graphopt.planner.step_graph import StepGraph

_ROUNDS = 3
_TRIES = 3


@dataclass(frozen=True)
class _Candidate:
    """A dropped storage: the entries between which it would have to live on, and what running it again costs."""

    storage: int
    start: int
    end: int
    nbytes: int
    seconds: float

    @property
    def worth(self) -> float:
        """Seconds saved for each byte held for the length of one call."""
        return self.seconds / (self.nbytes * (self.end - self.start + 1) + 1)


def polish(graph: StepGraph, outcome: Outcome, limit_bytes: int) -> Outcome:
    """An Outcome that costs no more than ``outcome`` and stays within ``limit_bytes``."""
    for _ in range(_ROUNDS):
        better = _filled(graph, outcome, limit_bytes)
        if better is None:
            return outcome
        outcome = better
    return outcome


def _filled(graph: StepGraph, outcome: Outcome, limit_bytes: int) -> Outcome | None:
    kept = _fitting(_candidates(graph, outcome), outcome, limit_bytes)
    for _ in range(_TRIES):
        if not kept:
            return None
        found = simulate(graph, outcome.choice.keeping(frozenset(kept)))
        if found.peak_bytes <= limit_bytes and found.seconds < outcome.seconds:
            return found
        kept = kept[: len(kept) // 2]
    return None


def _candidates(graph: StepGraph, outcome: Outcome) -> list[_Candidate]:
    order, content = outcome.order, outcome.content
    first: dict[int, int] = {}  # storage -> the entry after which its first instance is gone
    again: dict[int, int] = {}
    for number, s in enumerate(content):
        birth = outcome.birth[number]
        if birth < 0 or s not in outcome.choice.dropped:
            continue
        if order.is_twin[birth]:
            again[s] = min(again.get(s, birth), birth)
        else:
            first[s] = outcome.death[number]
    return [
        _Candidate(s, min(first[s] + 1, start), start, graph.nbytes[s], graph.seconds[graph.maker[s]])
        for s, start in sorted(again.items())
        if s in first
    ]


def _fitting(candidates: list[_Candidate], outcome: Outcome, limit_bytes: int) -> list[int]:
    live = np.array(outcome.live, dtype=np.int64)
    chosen = []
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.worth, candidate.storage)):
        span = live[candidate.start : candidate.end + 1]
        if int(span.max()) + candidate.nbytes <= limit_bytes:
            span += candidate.nbytes
            chosen.append(candidate.storage)
    return chosen
