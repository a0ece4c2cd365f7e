"""A step on Inductor whose peak is no higher than planned: regions that would raise it are cut until they do not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from graphopt.execute.lower_regions import Compiler, Lowering, lower_regions
from graphopt.execute.region import Region
from graphopt.execute.region_compile import compiled_region
from graphopt.execute.region_cuts import FEWEST_CALLS, Owners, Span, cut_spans, halves
from graphopt.execute.region_workspace import RegionWorkspace
from graphopt.ir.list_calls import join_list_calls
from graphopt.ir.liveness import MemoryPlan, plan_memory
from graphopt.ir.program import Program
from graphopt.ir.units import format_bytes
from graphopt.ir.write_results import write_all_results

log = logging.getLogger(__name__)

_MOST_ROUNDS = 8
"""Rounds of cutting. Each halves the regions at the peak, so that 160 calls become single ones."""

_ALLOWED_EXCESS = 1.01
_ALLOWED_EXCESS_BYTES = 1 << 16
"""By how much the peak may exceed the planned one: as far as plans of ATen steps may be off, and not worth a cut."""


@dataclass(frozen=True)
class CompiledRegions:
    """``program``: calls regions; ``notes``: what a report says about them; ``text``: what each distinct one holds."""

    program: Program
    notes: tuple[str, ...]
    text: str


def compile_regions(
    program: Program, *, most_bytes: int, compile_region: Compiler = compiled_region
) -> CompiledRegions:
    """``program`` (functional) by regions, its peak at most ``most_bytes`` as far as cutting regions can bring it."""
    most_bytes = int(most_bytes * _ALLOWED_EXCESS) + _ALLOWED_EXCESS_BYTES
    owners = Owners(program)
    spans: tuple[Span, ...] | None = cut_spans(program, owners)
    best: _Attempt | None = None
    for num_cut in range(_MOST_ROUNDS + 1):
        lowering = lower_regions(program, spans, compile_region=compile_region)
        write_all_results(lowering.program)
        join_list_calls(lowering.program)
        attempt = _Attempt(lowering, _plan(lowering.program), num_cut)
        if best is None or attempt.plan.peak_bytes < best.plan.peak_bytes:
            best = attempt
        spans = _cut_at_peak(lowering, attempt.plan, owners)
        if best.plan.peak_bytes <= most_bytes or spans is None:
            break
    assert best is not None, "there is at least one attempt"
    regions = dict.fromkeys(node.target for node in best.lowering.program.ops() if isinstance(node.target, Region))
    text = "\n".join(f"# {region.__name__}\n{region.text}" for region in regions)
    return CompiledRegions(best.lowering.program, _notes(best, most_bytes), text)


@dataclass(frozen=True)
class _Attempt:
    """A lowered program after ``num_cut`` rounds of cutting, and its plan."""

    lowering: Lowering
    plan: MemoryPlan
    num_cut: int


def _plan(program: Program) -> MemoryPlan:
    workspace = RegionWorkspace()
    workspace.learn(program)
    return plan_memory(program, workspace=workspace)


def _cut_at_peak(lowering: Lowering, plan: MemoryPlan, owners: Owners) -> tuple[Span, ...] | None:
    """The spans with the region at the peak, and all that are equal to it, cut in two; None if it is no region."""
    peak = plan.peak_at
    if peak is None or not isinstance(peak.target, Region):
        return None
    equal = {
        lowering.span_of[node.name]
        for node in plan.order
        if node.target is peak.target and node.name in lowering.span_of
    }
    spans: list[Span] = []
    for span in lowering.spans:
        if span not in equal:
            spans.append(span)
        elif len(span.nodes) > FEWEST_CALLS:
            spans += halves(span, owners)
        else:
            spans.append(Span(span.nodes, is_region=False))
    return tuple(spans)


def _notes(attempt: _Attempt, most_bytes: int) -> tuple[str, ...]:
    program = attempt.lowering.program
    calls = [node.target for node in program.ops() if isinstance(node.target, Region)]
    distinct = dict.fromkeys(calls)
    seconds = sum(region.seconds for region in distinct)
    notes = [
        f"inductor: {len(calls)} regions, {len(distinct)} of them distinct, compiled in {seconds:.1f} s; "
        f"{len(program.ops()) - len(calls)} plain calls and names"
    ]
    if attempt.num_cut:
        notes.append(f"inductor: regions at the peak were cut {attempt.num_cut} times, so that fusion raises it less")
    if attempt.plan.peak_bytes > most_bytes:
        peak, most = format_bytes(attempt.plan.peak_bytes), format_bytes(most_bytes)
        notes.append(f"inductor: the peak is {peak}; planned without fusion it is {most} or less")
    return tuple(notes)
