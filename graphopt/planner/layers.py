"""The layers of a model, as ranges of forward calls: by numbers in module paths, else by repetition in the graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from graphopt.ir.module_paths import numbered_prefixes
from graphopt.ir.program import Program
from graphopt.planner.step_graph import StepGraph

_FEW_LAYERS = 6
"""With fewer layers at one level of numbers (the stages of a ResNet), the level below is looked at."""
_MOST_LEVELS = 3
_LEAST_COVER = 0.5
"""Layers must hold at least so much of the forward part's cost to be the model's layers."""


@dataclass(frozen=True)
class Layer:
    """Forward nodes ``start`` to ``end`` (exclusive) under a name."""

    name: str
    start: int
    end: int


def find_layers(program: Program, graph: StepGraph) -> tuple[Layer, ...]:
    """The Layers of the forward part in order; empty if the model does not repeat itself."""
    named = _numbered_layers(program, graph)
    if _cover(graph, named) >= _LEAST_COVER:
        return named
    repeated = _repeated_layers(graph)
    return max((named, repeated), key=lambda layers: _cover(graph, layers))


def balanced_groups(layers: tuple[Layer, ...], count: int) -> tuple[Layer, ...]:
    """``layers`` joined to ``count`` groups whose lengths differ by at most one, the longer ones first."""
    count = min(count, len(layers))
    groups, start = [], 0
    for n in range(count):
        length = len(layers) // count + (n < len(layers) % count)
        joined = layers[start : start + length]
        name = joined[0].name if length == 1 else f"{joined[0].name} to {joined[-1].name}"
        groups.append(Layer(name, joined[0].start, joined[-1].end))
        start += length
    return tuple(groups)


def _cover(graph: StepGraph, layers: tuple[Layer, ...]) -> float:
    """The part of the forward part's cost (in calls when nothing has a cost) that lies in ``layers``."""
    if len(layers) < 2:
        return 0.0
    weights = graph.seconds if any(graph.seconds) else tuple(map(float, graph.is_call))
    total = sum(weights[: graph.first_late])
    return sum(sum(weights[layer.start : layer.end]) for layer in layers) / total if total else 0.0


def _numbered_layers(program: Program, graph: StepGraph) -> tuple[Layer, ...]:
    prefixes = [
        numbered_prefixes(program.origin(graph.nodes[i]).module) if graph.is_call[i] else []
        for i in range(graph.first_late)
    ]
    best: tuple[Layer, ...] = ()
    for level in range(_MOST_LEVELS):
        layers = _runs([found[level] if level < len(found) else "" for found in prefixes])
        if len(layers) >= 2:
            best = layers
        if len(layers) >= _FEW_LAYERS:
            break
    return best


def _runs(labels: list[str]) -> tuple[Layer, ...]:
    """One Layer for each stretch of one label; calls without a label belong to the stretch around them."""
    layers: list[Layer] = []
    for i, label in enumerate(labels):
        if not label:
            continue
        if layers and layers[-1].name == label:
            layers[-1] = Layer(label, layers[-1].start, i + 1)
        else:
            layers.append(Layer(label, i, i + 1))
    closed = [Layer(layer.name, layer.start, following.start) for layer, following in pairwise(layers)]
    return tuple(closed + layers[-1:])


def _repeated_layers(graph: StepGraph) -> tuple[Layer, ...]:
    """The stretch of calls that repeats most: same operators on same shapes, one period after the other."""
    calls = [i for i in range(graph.first_late) if graph.is_call[i]]
    keys = [_call_key(graph, i) for i in calls]
    best_start, best_period, best_length = 0, 0, 0
    for period in _periods(keys):
        start, length = _longest_match(keys, period)
        if length and (length + period, -period) > (best_length + best_period, -best_period):
            best_start, best_period, best_length = start, period, length
    if not best_period:
        return ()
    count = best_length // best_period + 1
    bounds = [best_start + n * best_period for n in range(count + 1)]
    ends = [calls[bound] if bound < len(calls) else graph.first_late for bound in bounds]
    return tuple(Layer(f"repeat {n}", ends[n], ends[n + 1]) for n in range(count))


def _call_key(graph: StepGraph, i: int) -> str:
    node = graph.nodes[i]
    return f"{node.target}{[graph.nbytes[s] for s in graph.held[i]]}"


def _periods(keys: list[str]) -> list[int]:
    """Distances at which a call finds its like, the most frequent ones first."""
    last: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for position, key in enumerate(keys):
        if key in last:
            distances[position - last[key]] += 1
        last[key] = position
    by_count = sorted(distances, key=lambda distance: (-distances[distance], distance))
    multiples = [2 * distance for distance in by_count[:8]]
    return sorted({*by_count[:16], *multiples, *_rare_periods(keys)})


def _rare_periods(keys: list[str]) -> list[int]:
    """Distances between the calls of each kind that is not among the frequent ones: they appear once a layer."""
    positions: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    found = []
    for places in positions.values():
        gaps = Counter(second - first for first, second in pairwise(places))
        if len(gaps) == 1:
            found.append(next(iter(gaps)))
    return [period for period, _ in Counter(found).most_common(16)]


def _longest_match(keys: list[str], period: int) -> tuple[int, int]:
    """Start and length of the longest stretch in which every call equals the one a period later, in whole periods."""
    best_start = best_length = start = 0
    length = 0
    for position in range(len(keys) - period):
        if keys[position] == keys[position + period]:
            start = position if not length else start
            length += 1
            if length > best_length:
                best_start, best_length = start, length
        else:
            length = 0
    return best_start, best_length // period * period
