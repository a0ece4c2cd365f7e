"""Real training steps as small graphs: stretches of calls joined to super-nodes."""

from __future__ import annotations

from benchmarks.models import model_named
from benchmarks.plan_graphs import PlanGraph
from graphopt.build import training_program
from graphopt.ir.liveness import no_workspace
from graphopt.ir.program import Stage
from graphopt.pipeline.default import default_pipeline
from graphopt.planner.costs import call_seconds
from graphopt.planner.step_graph import StepGraph, step_graph

_CONTRACTED = (("tiny-llama", 1), ("tiny-gpt2", 1), ("tiny-bert", 1), ("tiny-mlp", 6))
_SUPER_NODES = 18
"""In the forward part, and as many in the backward part."""
_BYTES = 1024  # sizes in KiB, rounded up, so that solvers count in small integers


def contracted_graphs() -> tuple[PlanGraph, ...]:
    """The contracted steps of small models, gradients being outputs."""
    found = []
    for name, layers in _CONTRACTED:
        model = model_named(name)
        joint = training_program(model.make_model(layers), model.make_batch(), outputs=["loss"])
        program = default_pipeline(Stage.JOINT).run(joint)
        graph = step_graph(program, seconds=call_seconds(program), workspace=no_workspace)
        found.append(contract(graph, model.label(layers), _SUPER_NODES))
    return tuple(found)


def contract(graph: StepGraph, name: str, count: int) -> PlanGraph:
    """``graph`` with ``count`` super-nodes of about equal cost in each part. A super-node makes one value: all that is
    made in it and read behind it; what is made and read inside alone is not counted. Draws stand alone."""
    group = _groups(graph, count)
    num = max(group.values()) + 1
    reads: list[set[int]] = [set() for _ in range(num)]
    leaving: list[set[int]] = [set() for _ in range(num)]
    returned = set()
    for i, own in group.items():
        for a in graph.arguments[i]:
            for s in graph.held[a]:
                maker = group.get(graph.maker[s])
                if maker is not None and maker != own and not graph.resident[s]:
                    reads[own].add(maker)
                    leaving[maker].add(s)
        if i in graph.returned:
            for s in (s for s in graph.held[i] if not graph.resident[s]):
                returned.add(group[graph.maker[s]])
                leaving[group[graph.maker[s]]].add(s)
    micros = [0.0] * num
    for i, own in group.items():
        micros[own] += graph.seconds[i] * 1e6
    return PlanGraph(
        name=name,
        arguments=tuple(tuple(sorted(found)) for found in reads),
        micros=tuple(max(1, round(cost)) for cost in micros),
        nbytes=tuple(-(-sum(graph.nbytes[s] for s in found) // _BYTES) for found in leaving),
        first_late=min(own for i, own in group.items() if i >= graph.first_late),
        fixed=frozenset(own for i, own in group.items() if not graph.repeatable[i]),
        returned=frozenset(returned),
    )


def _groups(graph: StepGraph, count: int) -> dict[int, int]:
    """The super-node of every call."""
    calls = [i for i in range(graph.num_nodes) if graph.is_call[i]]
    total = {late: sum(graph.seconds[i] for i in calls if (i >= graph.first_late) == late) for late in (False, True)}
    group: dict[int, int] = {}
    number, level, was = 0, 0.0, calls[0]
    for i in calls:
        late = i >= graph.first_late
        is_border = late != (was >= graph.first_late) or not graph.repeatable[i] or not graph.repeatable[was]
        if group and (is_border or level >= total[late] / count):
            number, level = number + 1, 0.0
        group[i] = number
        level += graph.seconds[i]
        was = i
    return group
