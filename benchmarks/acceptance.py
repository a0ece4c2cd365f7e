"""What a frontier must show, as checks: at the peak of each peer, at its time, and at the smallest budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.frontier_rows import AT_PEAK, AT_SMALL_SHARE, SMALL_SHARE, SMALLEST, FrontierFigures
from benchmarks.memory_peers import GRADIENT_CHECKPOINTING, is_compile_peer

# Our step over that of gradient checkpointing, at its peak.
CHECKPOINTING_TIME = 0.9
# The whole step over parameters and state alone, for the one model that this is asked of.
WHOLE_STEP = {"llama-110m": 1.18}
FIRST_STEP = 0.7
NO_WORSE = 1.0
# Predicted is measured to within this; so a budget may be exceeded by as much.
_PEAK_SLACK = 0.01
# At whose peaks Inductor is compared with Inductor.
_COMPILED = "inductor"

Points = Sequence[FrontierFigures]


@dataclass(frozen=True)
class Check:
    """One line: ``figure`` is to be at most ``bound``. None: it could not be measured, and ``note`` says why."""

    against: str
    what: str
    figure: float | None
    bound: float
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Whether there is a figure within the bound."""
        return self.figure is not None and self.figure <= self.bound


def checks(model: str, points: Points) -> tuple[Check, ...]:
    """Every check that the rows of ``model`` allow, in the order of its peers."""
    found: list[Check] = []
    for peer in points:
        if peer.name == GRADIENT_CHECKPOINTING and not peer.note:
            found += _against_checkpointing(peer, points)
        if is_compile_peer(peer.name) and not peer.note:
            found += _against_compile(peer, points)
    return (*found, *_beyond_compile(points), *_whole_step(model, points), *_budgets(points))


def _against_checkpointing(peer: FrontierFigures, points: Points) -> Iterator[Check]:
    for own in _beside(points, peer, AT_PEAK):
        yield _time_check(own, peer, f"{own.backend}: step time at its peak", CHECKPOINTING_TIME, share=1.0)
    for own in _beside(points, peer, AT_SMALL_SHARE):
        what = f"{own.backend}: step time at {SMALL_SHARE:g} of its peak"
        yield _time_check(own, peer, what, NO_WORSE, share=SMALL_SHARE)
    for own in points:
        if own.is_own and own.beside == peer.name and own.setting not in (AT_PEAK, AT_SMALL_SHARE):
            name = f"{own.backend}: {own.setting}"
            yield Check(peer.name, f"{name}, peak", _ratio(own.peak_bytes, peer.peak_bytes), NO_WORSE, own.note)
            yield Check(peer.name, f"{name}, step time", own.beside_ratio, NO_WORSE, own.note)


def _against_compile(peer: FrontierFigures, points: Points) -> Iterator[Check]:
    for own in _beside(points, peer, AT_PEAK):
        if own.backend != _COMPILED:
            continue
        yield _time_check(own, peer, f"{own.backend}: step time at its peak", NO_WORSE, share=1.0)
        first = _ratio(own.first_step_seconds, peer.first_step_seconds)
        yield Check(peer.name, f"{own.backend}: first step, compile included", first, FIRST_STEP, own.note)


def _beyond_compile(points: Points) -> Iterator[Check]:
    """The smallest peak of ours over the smallest of torch.compile, whatever its budget."""
    theirs = [point.peak_bytes for point in points if is_compile_peer(point.name) and point.peak_bytes is not None]
    if not theirs:
        return
    for own in points:
        if own.setting == SMALLEST:
            what = f"{own.backend}: smallest peak over its smallest"
            yield Check("torch.compile, every budget", what, _ratio(own.peak_bytes, min(theirs)), NO_WORSE, own.note)


def _whole_step(model: str, points: Points) -> Iterator[Check]:
    if model not in WHOLE_STEP:
        return
    for own in points:
        if own.setting == SMALLEST:
            whole = None if own.peak_bytes is None else own.peak_bytes + (own.resting_bytes or 0)
            what = f"{own.backend}: whole step over parameters and state"
            yield Check("", what, _ratio(whole, own.resting_bytes), WHOLE_STEP[model], own.note)


def _budgets(points: Points) -> Iterator[Check]:
    """The worst of the ratios of what was taken to what was allowed, for each backend."""
    for backend in dict.fromkeys(point.backend for point in points if point.is_own):
        own = [(point.budget_ratio, point.label) for point in points if point.is_own and point.backend == backend]
        taken = [(ratio, label) for ratio, label in own if ratio is not None]
        if taken:
            worst, label = max(taken)
            yield Check(
                "its budget", f"{backend}: whole step, the worst of {len(taken)}", worst, 1 + _PEAK_SLACK, label
            )


def _time_check(own: FrontierFigures, peer: FrontierFigures, what: str, bound: float, *, share: float) -> Check:
    """Time beside ``peer``; no figure unless the peak really is within ``share`` of the peer's."""
    ratio = _ratio(own.peak_bytes, peer.peak_bytes)
    if ratio is not None and ratio > share * (1 + _PEAK_SLACK):
        return Check(peer.name, what, None, bound, f"the peak is {ratio:.2f} of its peak")
    return Check(peer.name, what, own.beside_ratio, bound, own.note)


def _beside(points: Points, peer: FrontierFigures, setting: str) -> Iterator[FrontierFigures]:
    return (point for point in points if point.is_own and point.beside == peer.name and point.setting == setting)


def _ratio(figure: float | None, base: float | None) -> float | None:
    return None if figure is None or not base else figure / base
