"""Regions without a compiler: what is cut and put together again is the same, and each region is interpreted."""

from __future__ import annotations

import itertools
from typing import Any

from graphopt.execute.region import Region
from graphopt.execute.region_graph import RegionGraph
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline


class InterpretedRegions:
    """Makes regions that run their graph operator by operator; equal ones are one, as when they are compiled."""

    def __init__(self) -> None:
        self.made: dict[str, Region] = {}
        self.numbers = itertools.count()

    def __call__(self, graph: RegionGraph) -> Region:
        def run(inputs: list[Any]) -> tuple[Any, ...]:
            arguments = tuple(inputs)
            inputs.clear()
            return graph.run(*arguments)

        if graph.text not in self.made:
            self.made[graph.text] = Region(graph, next(self.numbers), run, 0.0)
        return self.made[graph.text]


def functional_step(program: Program) -> Program:
    """``program`` after the step passes that keep it functional."""
    return Pipeline(tuple(item for item in default_pipeline(Stage.STEP) if not item.in_place)).run(program)


def region_calls(program: Program) -> list[Region]:
    """The regions that a lowered program calls, in order."""
    return [node.target for node in program.ops() if isinstance(node.target, Region)]
