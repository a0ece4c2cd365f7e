"""Paged state is on its way before its update runs: the first range is fetched ahead, beside what runs until then.

Before::

    mm = aten.mm.default(t, x)
    paged_update = graphopt.paged_update.default(p_weight, mm, s_pages_weight, None, [lr, ...], 'AdamW_0', 7, 2097152)

After::

    page_in = graphopt.page_in.default(s_pages_weight, 2097152, 'AdamW_0', 65536, device=cpu)
    mm = aten.mm.default(t, x)
    paged_update = graphopt.paged_update.default(p_weight, mm, s_pages_weight, ..., 2097152, page_in)

Saves the wait for the first range of each parameter, which is all of a small one's. Costs one staging buffer, the state
of at most one range, from the fetch to the update; the plan counts it. A fetch starts at most ``lead`` calls ahead,
not before the update before its own, so no more than two are under way, and not in the forward part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphopt.ir import ops
from graphopt.ir.liveness import forward_end
from graphopt.ir.paged_state import fetch_before, waits_for_its_first_range
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Pass


@dataclass(frozen=True)
class PrefetchState(Pass):
    """Start to fetch paged state ``lead`` calls before its update."""

    lead: int = 4

    name: ClassVar[str] = "prefetch-state"
    stage: ClassVar[Stage] = Stage.STEP

    def apply(self, program: Program) -> Changes:
        order = program.ops()
        # Behind the first call of the backward part, which alone says where that part begins.
        earliest = forward_end(program) + 1 if forward_end(program) < len(order) else 0
        count = 0
        for position, node in enumerate(order):
            if not ops.is_paged_update(node):
                continue
            if waits_for_its_first_range(node):
                fetch_before(program, node, order[min(position, max(earliest, position - self.lead))])
                count += 1
            earliest = position
        return Changes(count)
