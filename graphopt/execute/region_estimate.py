"""What compiling a step by regions would save and cost, known before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.execute.region_cuts import Owners, cut_spans
from graphopt.execute.region_graph import region_graph
from graphopt.execute.region_reads import span_readers
from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.ir.storage import tensors_in

SECONDS_PER_CALL = 2e-6
"""What Python and the dispatcher cost for each operator that a region swallows."""

BYTES_PER_SECOND = 8e9
"""At which a value that stays inside a region would have been written and read again (one core, large tensors)."""

SECONDS_PER_REGION = 0.5
SECONDS_PER_CALL_COMPILED = 0.03
"""Compiling a region takes about 0.5 s and 0.03 s for each of its calls (g++ -O3, two cores)."""


@dataclass(frozen=True)
class RegionEstimate:
    """Seconds that a step is shorter, seconds that compiling takes, and how many regions there are."""

    saved_seconds: float
    compile_seconds: float
    num_regions: int


def estimate_regions(program: Program) -> RegionEstimate:
    """The RegionEstimate of ``program`` (functional)."""
    owners = Owners(program)
    spans = cut_spans(program, owners)
    readers = span_readers(program, owners, spans)
    saved, num_regions = 0.0, 0
    compile_seconds: dict[str, float] = {}
    for number, span in enumerate(spans):
        if not span.is_region:
            continue
        num_regions += 1
        leaving = {value for value, numbers in readers.items() if numbers - {number}}
        graph = region_graph(span, owners, needed=leaving.__contains__, updates={})
        compile_seconds[graph.text] = SECONDS_PER_REGION + SECONDS_PER_CALL_COMPILED * len(span.nodes)
        saved += SECONDS_PER_CALL * len(graph.body)
        saved += 2 * sum(_fused_bytes(node) for node in span.nodes if node not in leaving) / BYTES_PER_SECOND
    return RegionEstimate(saved, sum(compile_seconds.values()), num_regions)


def _fused_bytes(node: fx.Node) -> int:
    """Bytes of a result that fusion need not write: those of pointwise calls that stay inside."""
    if not ops.is_pointwise(node):
        return 0
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors_in(node.meta["val"]))
