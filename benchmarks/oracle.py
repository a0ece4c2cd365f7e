"""How far the planner is from the proven optimum, on small graphs.

``python -m benchmarks.oracle``

For each graph of ``benchmarks/plan_graphs.py`` and of contracted models, five budgets between the smallest peak that
the planner finds and the peak of keeping everything. CP-SAT proves the least time of running nodes again, any node at
any time, with so many copies of a value (more where fewer allow no plan).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.command import Results, console, run_command, with_progress
from benchmarks.contracted import contracted_graphs
from benchmarks.machine import Machine, this_machine
from benchmarks.oracle_cp import Proof, prove_optimum
from benchmarks.plan_graphs import SKETCHED, PlanGraph
from benchmarks.rows import RESULTS
from graphopt.planner.frontier import search_frontier
from graphopt.planner.schedule import KEEP_ALL
from graphopt.planner.simulate import simulate

NUM_BUDGETS = 5
_COPIES = (3, 4, 6, 10)
_TARGET = 0.03


@dataclass(frozen=True)
class OracleFigures:
    """One graph within one budget. ``planner_micros``: cost of what our plan runs again; ``bound_micros``: no plan with
    up to ``copies`` copies of a value costs less; ``is_proven``: a plan of that cost exists. ``keep_all_bytes``: the
    peak without running anything again; ``smallest_bytes``: the smallest peak the planner finds."""

    graph: str
    num_nodes: int
    limit_bytes: int
    keep_all_bytes: int
    smallest_bytes: int
    planner_micros: int
    bound_micros: int
    is_proven: bool
    copies: int
    forward_micros: int
    planner_seconds: float
    oracle_seconds: float

    @property
    def gap(self) -> float:
        """What our plan costs beyond the bound, over the bound."""
        return (self.planner_micros - self.bound_micros) / max(self.bound_micros, 1)


@dataclass(frozen=True)
class OracleRow:
    """One stored line."""

    machine: Machine
    figures: OracleFigures


def compare(graph: PlanGraph, *, seconds: float) -> Iterator[OracleFigures]:
    """The figures of ``graph`` for every budget; ``seconds``: the most that one proof takes."""
    step = graph.step_graph()
    started = time.perf_counter()
    frontier = search_frontier(step)
    planner_seconds = time.perf_counter() - started
    top, low = simulate(step, KEEP_ALL).peak_bytes, frontier.smallest_peak
    for n in range(NUM_BUDGETS):
        limit = low + (top - low) * n // NUM_BUDGETS
        best = frontier.best(limit)
        assert best is not None, "the frontier has a plan for every limit from its smallest peak on"
        micros = round(best.seconds * 1e6)
        started = time.perf_counter()
        proof, copies = _proof(graph, limit, micros, seconds)
        yield OracleFigures(
            graph=graph.name,
            num_nodes=graph.num_nodes,
            limit_bytes=limit,
            keep_all_bytes=top,
            smallest_bytes=low,
            planner_micros=micros,
            bound_micros=proof.bound,
            is_proven=proof.is_proven,
            copies=copies,
            forward_micros=sum(graph.micros[: graph.first_late]),
            planner_seconds=planner_seconds,
            oracle_seconds=time.perf_counter() - started,
        )


def _proof(graph: PlanGraph, limit: int, known: int, seconds: float) -> tuple[Proof, int]:
    """The first proof with a plan; where no number of copies gives one, nothing is known but that costs are not
    negative."""
    for copies in _COPIES:
        proof = prove_optimum(graph, limit, copies=copies, known=known, seconds=seconds)
        if not proof.is_infeasible:
            return proof, copies
    return Proof(None, 0, False), _COPIES[-1]


def all_graphs() -> tuple[PlanGraph, ...]:
    """The graphs that are compared: sketches, and models whose calls are joined to super-nodes."""
    return (*(make() for make in SKETCHED), *contracted_graphs())


def oracle_table(rows: tuple[OracleRow, ...]) -> Table:
    """One line for each graph: the gap at each budget, from the tightest."""
    table = Table("graph", "nodes", title="gap to the proven optimum, in time that runs again")
    for n in range(NUM_BUDGETS):
        table.add_column(f"budget {n}", justify="right")
    for name in dict.fromkeys(row.figures.graph for row in rows):
        own = [row.figures for row in rows if row.figures.graph == name]
        cells = [f"{100 * found.gap:.1f} %{'' if found.is_proven else ' (bound)'}" for found in own]
        table.add_row(name, str(own[0].num_nodes), *cells)
    return table


def store(path: Path, rows: tuple[OracleRow, ...]) -> None:
    """Write ``rows`` as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def main(
    seconds: Annotated[float, typer.Option(help="The most seconds that one proof may take.")] = 30.0,
    results: Results = RESULTS,
) -> None:
    """Compare the planner with proven optima."""
    machine, graphs = this_machine(), all_graphs()
    found: list[OracleRow] = []
    for graph in with_progress(graphs, total=len(graphs), description="graphs"):
        found += [OracleRow(machine, figures) for figures in compare(graph, seconds=seconds)]
        store(results / "oracle.jsonl", tuple(found))
    console().print(oracle_table(tuple(found)))
    within = sum(row.figures.gap <= _TARGET for row in found)
    console().print(f"{within} of {len(found)} within {100 * _TARGET:.0f} %; written to {results / 'oracle.jsonl'}")


if __name__ == "__main__":
    run_command(main)
