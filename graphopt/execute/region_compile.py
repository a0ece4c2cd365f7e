"""Regions through Inductor: each distinct one is compiled once a process.

Private torch: ``torch._inductor`` (``compile_fx_inner``, ``config``), ``torch._guards``, ``make_fx`` and ``ShapeEnv``
(torch 2.11 to 2.14).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphopt.capture.trace import fake_like
from graphopt.execute.region import Region
from graphopt.execute.region_decompositions import decompositions
from graphopt.execute.region_graph import RegionGraph
from graphopt.ir import ops
from graphopt.ir.fake import FakeTensorMode
from graphopt.ir.spec import TensorSpec

log = logging.getLogger(__name__)

_SETTINGS = {
    # Inside a region, too, the order with the lower peak is wanted.
    "reorder_for_peak_memory": True,
    # Layouts at the borders are those of the plan; views behind them were captured for these.
    "keep_output_stride": True,
    "fallback_random": True,
    "triton.cudagraphs": False,
}

_SETTINGS_WITH_CODES = {
    # What is quantized is rounded to two bytes first, wherever the plan rounds: a difference in the eighth bit would
    # move a scale, and with it every code. So codes are the operators', and a kept value is the one they stand for.
    "emulate_precision_casts": True,
}

_MOST_COMPILED = 512
_COMPILED: OrderedDict[Any, Callable[[list[Any]], Sequence[Any]]] = OrderedDict()


def compiled_region(graph: RegionGraph, number: int) -> Region:
    """The Region of ``graph``, called ``region_<number>``; compiled unless an equal one has been in this process."""
    key = (graph.text, torch.get_num_threads())
    seconds = 0.0
    if key not in _COMPILED:
        started = time.perf_counter()
        _COMPILED[key] = _compile(graph)
        seconds = time.perf_counter() - started
        log.info("region_%d: %d calls compiled in %.2f s", number, len(graph.body), seconds)
    _COMPILED.move_to_end(key)
    if len(_COMPILED) > _MOST_COMPILED:
        _COMPILED.popitem(last=False)
    return Region(graph, number, _COMPILED[key], seconds)


def _compile(graph: RegionGraph) -> Callable[[list[Any]], Sequence[Any]]:
    # Inductor keeps what it compiled on disk, but only if it finds a shape environment (unused: all shapes are fixed).
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [fake_like(mode, spec) for spec in graph.input_specs]
    makes_codes = any(ops.is_fp8_cast(node) for node in graph.body)
    settings = {**_SETTINGS, **(_SETTINGS_WITH_CODES if makes_codes else {})}
    with torch.no_grad(), config.patch(settings), tracing(TracingContext(mode)):
        traced = make_fx(graph.run, decomposition_table=decompositions(), tracing_mode="real")(*fakes)
        _fix_output_layouts(traced, graph.output_specs)
        compiled: Any = compile_fx_inner(traced, fakes)
    return compiled  # type: ignore[no-any-return]


def _fix_output_layouts(traced: fx.GraphModule, specs: Sequence[TensorSpec]) -> None:
    """Tell Inductor that every output has the layout of the plan."""
    output = traced.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    output.meta["user_visible_output_idxs"] = list(range(len(specs)))
    output.meta["original_output_strides"] = [spec.stride for spec in specs]
