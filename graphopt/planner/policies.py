"""What each checkpoint policy drops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from graphopt.checkpoint import EveryN, Manual, Policy, Segments, SqrtN, ValueFacts
from graphopt.errors import UnsupportedError
from graphopt.ir.program import Program
from graphopt.ir.text import value_text
from graphopt.planner.layers import Layer, balanced_groups, find_layers
from graphopt.planner.schedule import Choice
from graphopt.planner.step_graph import StepGraph


def policy_choice(program: Program, graph: StepGraph, policies: Iterable[Policy]) -> Choice:
    """What the ``policies`` together drop. Raises UnsupportedError for one that matches nothing."""
    dropped: set[int] = set()
    for policy in policies:
        dropped |= _dropped(program, graph, policy)
    return Choice(frozenset(dropped - _smaller_than_their_draws(graph, dropped)))


def _smaller_than_their_draws(graph: StepGraph, dropped: set[int]) -> set[int]:
    """Of ``dropped``, what is computed from larger memory that must be kept because it cannot be computed again."""
    found = set()
    for s in dropped:
        maker = graph.maker[s]
        sources = {t for a in graph.arguments[maker] for t in graph.held[a] if not graph.resident[t]}
        drawn = sum(graph.nbytes[t] for t in sources if not graph.repeatable[graph.maker[t]])
        if graph.nbytes[s] < drawn:
            found.add(s)
    return found


def _dropped(program: Program, graph: StepGraph, policy: Policy) -> set[int]:
    if isinstance(policy, Manual):
        if callable(policy.which):
            return _by_predicate(program, graph, policy.which)
        return _inside(graph, [group for name in policy.which for group in _matching(program, graph, name)])
    layers = find_layers(program, graph)
    if not layers:
        raise UnsupportedError(
            f"{policy} needs layers, but no module path has numbers and nothing in the graph repeats itself; name what "
            "to compute again with graphopt.checkpoint.Manual, or give a budget with memory="
        )
    return _inside(graph, balanced_groups(layers, _num_groups(policy, len(layers))))


def _num_groups(policy: Policy, num_layers: int) -> int:
    if isinstance(policy, EveryN):
        return math.ceil(num_layers / policy.n)
    if isinstance(policy, Segments):
        return policy.count
    if isinstance(policy, SqrtN):
        return math.ceil(math.sqrt(num_layers))
    raise UnsupportedError(f"{policy} does not say what to compute again")


def _inside(graph: StepGraph, groups: Iterable[Layer]) -> set[int]:
    """Storages that are made in a group and that no forward call behind it reads."""
    dropped: set[int] = set()
    last_read: dict[int, int] = {}
    for i in range(graph.first_late):
        for a in graph.arguments[i]:
            last_read.update(dict.fromkeys(graph.held[a], i))
    for group in groups:
        for s in graph.early_storages():
            maker = graph.maker[s]
            if group.start <= maker < group.end and graph.repeatable[maker] and last_read.get(s, -1) < group.end:
                dropped.add(s)
    return dropped


def _matching(program: Program, graph: StepGraph, pattern: str) -> list[Layer]:
    """The stretches of forward calls that modules matching ``pattern`` make."""
    groups: list[Layer] = []
    for i in range(graph.first_late):
        if not graph.is_call[i]:
            continue
        module = program.origin(graph.nodes[i]).module
        if not _matches(module, pattern):
            continue
        if groups and _same_stretch(program, graph, groups[-1].end, i, pattern):
            groups[-1] = Layer(pattern, groups[-1].start, i + 1)
        else:
            groups.append(Layer(pattern, i, i + 1))
    if not groups:
        paths = sorted({program.origin(node).module for node in graph.nodes[: graph.first_late]} - {""})
        raise UnsupportedError(f"no module path matches {pattern!r}; there are {', '.join(paths[:12]) or 'none'}, ...")
    return groups


def _same_stretch(program: Program, graph: StepGraph, start: int, end: int, pattern: str) -> bool:
    """Whether no other module's call lies between."""
    return all(
        not graph.is_call[i] or not (module := program.origin(graph.nodes[i]).module) or _matches(module, pattern)
        for i in range(start, end)
    )


def _matches(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _by_predicate(program: Program, graph: StepGraph, predicate: Callable[[ValueFacts], bool]) -> set[int]:
    dropped = set()
    for s in graph.early_storages():
        if not graph.repeatable[graph.maker[s]]:
            continue
        facts = value_facts(program, graph, s)
        try:
            is_dropped = predicate(facts)
        except Exception as error:
            raise UnsupportedError(
                f"the predicate of Manual expects one ValueFacts and says whether to drop the value; for {facts} it "
                f"raised {type(error).__name__}: {error}"
            ) from error
        if is_dropped:
            dropped.add(s)
    return dropped


def value_facts(program: Program, graph: StepGraph, s: int) -> ValueFacts:
    """What a predicate is told about storage ``s``."""
    node, maker = graph.nodes[graph.value[s]], graph.nodes[graph.maker[s]]
    origin = program.origin(node)
    return ValueFacts(
        node.name, origin.module, str(maker.target), value_text(node.meta["val"]), graph.nbytes[s], origin.source
    )
