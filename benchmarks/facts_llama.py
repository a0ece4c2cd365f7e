"""Anchors of a small Llama: recomputed matrix work at given peaks, against the best public plan known for each.

``python -m benchmarks.facts_llama [--layers 8,24]``

Forward and backward with gradients as outputs. The peak is that of the plan: parameters and batch are there throughout,
gradients stay to the end, operators allocate nothing but their results (the row has the peak with their own workspace
too). Recomputed work is the FLOPs of matrix products and attention that run again, over those of the forward part.
Nothing is timed. The anchors were computed with torch 2.13 by a simulator of storage liveness over the graphs that
torch's partitioner emits, with its memory budget, or with the first k blocks checkpointed ("first k").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from torch import nn

import graphopt
from benchmarks.cells import bytes_cell
from benchmarks.command import Results, console, run_command, seed_weights, with_progress
from benchmarks.machine import this_machine
from benchmarks.memory_settings import split_list
from benchmarks.models import MODELS, Batch
from benchmarks.rows import RESULTS, Row, store_rows, subject_of
from graphopt.errors import BudgetError, DataError
from graphopt.ir.liveness import forward_end, plan_memory
from graphopt.ir.program import Program
from graphopt.planner.costs import node_flops
from graphopt.report.data import Report

MODEL = "llama-d128"
_DEFAULT_LAYERS = "8,24"
# The suffix that the pass ``recompute`` gives to what runs again.
_TWIN = "_again"
_LARGEST_SHOWN = 6
_LEAST_BUDGET = 1
_MEGA = 1_000_000


@dataclass(frozen=True)
class Anchor:
    """A plan to beat: at most ``peak_bytes``, and less recomputed work than ``share`` (0.0: none either)."""

    plan: str
    peak_bytes: int
    share: float


@dataclass(frozen=True)
class FactsFigures:
    """One anchor and our plan at its peak. ``anchor_share`` None: no public plan is known down there.

    ``peak_bytes``: parameters and batch included, without what operators allocate inside themselves, which
    ``peak_with_workspace_bytes`` has. ``holders``: the largest values alive at the peak. ``note`` says why figures are
    None.
    """

    layers: int
    anchor: str
    anchor_bytes: int
    anchor_share: float | None
    peak_bytes: int | None = None
    peak_with_workspace_bytes: int | None = None
    num_recomputed: int | None = None
    recomputed_flops: int | None = None
    forward_flops: int | None = None
    peak_at: str = ""
    holders: tuple[str, ...] = ()
    note: str = ""

    @property
    def share(self) -> float | None:
        """Recomputed matrix work over that of the forward part."""
        if self.recomputed_flops is None or not self.forward_flops:
            return None
        return self.recomputed_flops / self.forward_flops

    @property
    def is_met(self) -> bool:
        """Whether the peak is no higher and less matrix work (if the anchor has any) runs again."""
        if self.peak_bytes is None or self.share is None or self.peak_bytes > self.anchor_bytes:
            return False
        if self.anchor_share is None:
            return self.peak_bytes < self.anchor_bytes
        return self.share < self.anchor_share or self.share == self.anchor_share == 0.0


def _megabytes(megabytes: float) -> int:
    return round(megabytes * _MEGA)


ANCHORS: dict[int, tuple[Anchor, ...]] = {
    8: (
        Anchor("torch, budget 0.8", _megabytes(42.05), 0.0),
        Anchor("torch, budget 0.6", _megabytes(41.47), 0.142),
        Anchor("budget 0.8 and first 3", _megabytes(38.37), 0.311),
        Anchor("first 4", _megabytes(34.16), 0.405),
        Anchor("first 5", _megabytes(29.17), 0.500),
        Anchor("first 6", _megabytes(24.94), 0.595),
    ),
    24: (
        Anchor("torch, budget 0.8", _megabytes(117.8), 0.0),
        Anchor("first 12", _megabytes(95.1), 0.394),
        Anchor("first 16", _megabytes(75.2), 0.523),
        Anchor("first 20", _megabytes(58.5), 0.651),
    ),
}


def measure_anchor(model: nn.Module, batch: Batch, start: FactsFigures, *, budget_bytes: int) -> FactsFigures:
    """``start`` with the figures of our plan for ``budget_bytes``; a note instead if there is none."""
    try:
        compiled = _compiled(model, batch, budget_bytes)
    except BudgetError as error:
        return replace(start, note=f"the smallest feasible budget is {error.smallest_bytes} bytes")
    return _figures(compiled.program, compiled.report(), start)


def smallest_budget(model: nn.Module, batch: Batch) -> int:
    """The smallest budget that the planner says it can meet, in bytes."""
    try:
        _compiled(model, batch, _LEAST_BUDGET)
    except BudgetError as error:
        return error.smallest_bytes
    raise AssertionError("no step fits into one byte")


def facts_table(figures: Sequence[FactsFigures], *, layout: box.Box = box.HEAVY_HEAD) -> Table:
    """One line for each anchor."""
    table = Table("layers", "anchor", box=layout)
    for heading in ("its peak", "its work", "our peak", "with workspace", "our work", "values", "met"):
        table.add_column(heading, justify="right")
    for found in figures:
        table.add_row(
            str(found.layers),
            found.anchor,
            _megabyte_cell(found.anchor_bytes),
            _share_cell(found.anchor_share),
            _megabyte_cell(found.peak_bytes),
            _megabyte_cell(found.peak_with_workspace_bytes),
            _share_cell(found.share),
            "" if found.num_recomputed is None else str(found.num_recomputed),
            found.note or ("yes" if found.is_met else "no"),
        )
    return table


def missed_lines(figures: Sequence[FactsFigures]) -> list[str]:
    """For each anchor that is missed, what holds our peak."""
    return [
        f"{found.layers} layers, {found.anchor}: the peak is at {found.peak_at}, where {', '.join(found.holders)} live"
        for found in figures
        if not found.is_met and found.holders
    ]


def _compiled(model: nn.Module, batch: Batch, budget_bytes: int) -> Any:
    compiled = graphopt.compile(model, outputs=["loss"], memory=budget_bytes, backend="aten")
    compiled(**batch)
    return compiled


def _figures(program: Program, report: Report, start: FactsFigures) -> FactsFigures:
    order = program.ops()
    again = [node for node in order if _TWIN in node.name]
    plan = plan_memory(program)
    return replace(
        start,
        peak_bytes=plan.peak_bytes + plan.resident_bytes,
        peak_with_workspace_bytes=report.predicted_peak_bytes + report.resident_bytes,
        num_recomputed=len(again),
        recomputed_flops=sum(map(node_flops, again)),
        forward_flops=sum(map(node_flops, order[: forward_end(program)])),
        peak_at=str(plan.peak_at),
        holders=tuple(
            f"{value.name} {value.spec} ({bytes_cell(value.nbytes)}, {value.memory_class})"
            for value in report.largest[:_LARGEST_SHOWN]
        ),
    )


def _measured(layers: tuple[int, ...]) -> Iterator[Row[FactsFigures]]:
    benchmark = MODELS[MODEL]
    for count in layers:
        seed_weights()
        model, batch = benchmark.make_model(count), benchmark.make_batch()
        subject, machine = subject_of(benchmark, model, batch, layers=count), this_machine()
        for anchor in ANCHORS[count]:
            start = FactsFigures(count, anchor.plan, anchor.peak_bytes, anchor.share)
            yield Row(subject, machine, measure_anchor(model, batch, start, budget_bytes=anchor.peak_bytes))
        lowest = min(anchor.peak_bytes for anchor in ANCHORS[count])
        start = FactsFigures(count, "smallest feasible", lowest, None)
        yield Row(subject, machine, measure_anchor(model, batch, start, budget_bytes=smallest_budget(model, batch)))


def _layer_counts(text: str) -> tuple[int, ...]:
    parts = split_list(text)
    if not parts or not all(part.isdigit() and int(part) in ANCHORS for part in parts):
        raise DataError(f"--layers expects some of {', '.join(map(str, ANCHORS))}, which have anchors; came {text!r}")
    return tuple(map(int, parts))


def _megabyte_cell(num_bytes: int | None) -> str:
    """In units of 1,000,000, as the anchors are known."""
    return "" if num_bytes is None else f"{num_bytes / _MEGA:.2f} MB"


def _share_cell(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def main(
    layers: Annotated[str, typer.Option(help="Numbers of layers that have anchors.")] = _DEFAULT_LAYERS,
    results: Results = RESULTS,
) -> None:
    """Compare our plans of a small Llama with the best public ones at their peaks."""
    counts = _layer_counts(layers)
    total = sum(len(ANCHORS[count]) + 1 for count in counts)
    path = results / f"facts-{MODEL}.jsonl"
    rows = list(store_rows(path, with_progress(_measured(counts), total=total, description=MODEL)))
    figures = [row.figures for row in rows]
    console().print(facts_table(figures))
    for line in missed_lines(figures):
        console().print(line)
    console().print(f"written to {path}")


if __name__ == "__main__":
    run_command(main)
