"""What compiled regions allocate inside themselves, found by running each once under the allocator's eye.

A region frees inputs that die in it at their last use inside, so at its highest moment it may hold less than its inputs
and results together: then the number is negative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.execute.measure import memory_changes
from graphopt.execute.region import Region
from graphopt.execute.workspace import MeasuredWorkspace
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program
from graphopt.ir.spec import TensorSpec
from graphopt.ir.storage import storage_map

# A size no region allocates: prime and odd.
_MARKER_BYTES = 7907

_KNOWN: dict[Any, int] = {}


class RegionWorkspace:
    """A Workspace for lowered programs: regions measured here, operators by MeasuredWorkspace."""

    def __init__(self) -> None:
        self.operators = MeasuredWorkspace()
        self._bytes: dict[fx.Node, int] = {}

    def learn(self, program: Program) -> None:
        """Measure every call of ``program`` that has not been measured before."""
        self.operators.learn(program)
        plan = plan_memory(program)
        dying = dict(zip(plan.order, plan.free_after, strict=True))
        storages = storage_map(program)
        for node in plan.order:
            if not isinstance(node.target, Region):
                continue
            freed = {number for gone in dying[node] for number in storages.held[gone]}
            dies = tuple(
                argument in dying[node] and freed.issuperset(storages.held[argument])
                for argument in node.all_input_nodes
            )
            self._bytes[node] = _measured(node, node.target, dies)

    def __call__(self, node: fx.Node) -> int:
        """Bytes beyond inputs and results that the call ``node`` needs at its highest moment."""
        if isinstance(node.target, Region):
            return self._bytes[node]
        return self.operators(node)


def _measured(node: fx.Node, region: Region, dies: tuple[bool, ...]) -> int:
    specs = [TensorSpec.of(argument.meta["val"]) for argument in node.all_input_nodes]
    if any(spec.device.type != "cpu" for spec in specs):
        return 0
    key = (region.text, dies, torch.get_num_threads())
    if key not in _KNOWN:
        _KNOWN[key] = _run_once(region, specs, dies)
    return _KNOWN[key]


def _run_once(region: Region, specs: list[TensorSpec], dies: tuple[bool, ...]) -> int:
    inputs: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def make_inputs() -> None:
        # Under the same eye: the release of what was allocated before would not be seen.
        inputs.extend(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).zero_() for spec in specs)
        kept.extend(tensor for tensor, gone in zip(inputs, dies, strict=True) if not gone)

    with torch.no_grad():
        _, changes = memory_changes([make_inputs, lambda: region.boxed(inputs)], marker_bytes=_MARKER_BYTES)
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak - sum(spec.nbytes for spec in region.output_specs)
