"""Regions without a compiler: what is cut and put together again is the same, and each region is interpreted."""

from __future__ import annotations

from typing import Any

from graphopt.execute.region import Region
from graphopt.execute.region_graph import RegionGraph
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline


class InterpretedRegions:
    """Makes regions that run their graph operator by operator, and remembers them."""

    def __init__(self) -> None:
        self.made: list[Region] = []

    def __call__(self, graph: RegionGraph, number: int) -> Region:
        def run(inputs: list[Any]) -> tuple[Any, ...]:
            arguments = tuple(inputs)
            inputs.clear()
            return graph.run(*arguments)

        region = Region(graph, number, run, 0.0)
        region.text = f"# interpreted\n{region.text}"  # what is measured of it is not that of compiled code
        self.made.append(region)
        return region


def functional_step(program: Program) -> Program:
    """``program`` after the step passes that keep it functional."""
    return Pipeline(tuple(item for item in default_pipeline(Stage.STEP) if not item.in_place)).run(program)


def region_calls(program: Program) -> list[Region]:
    """The regions that a lowered program calls, in order."""
    return [node.target for node in program.ops() if isinstance(node.target, Region)]
