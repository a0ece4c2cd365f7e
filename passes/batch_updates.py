"""Updates by blocks that run with the same numbers become one call for all their parameters.

Before::

    graphopt.block_adam_(p_a, mm, s_exp_avg_a, ..., factor, lr, ..., 256, 'companded', ...)
    graphopt.block_adam_(p_b, mm_1, s_exp_avg_b, ..., factor, lr, ..., 256, 'companded', ...)

After::

    graphopt.block_adam_list_([p_a, p_b], [mm, mm_1], [s_exp_avg_a, s_exp_avg_b], ..., factor, lr, ...)

Saves one launch for each parameter but the first; no bytes: the calls write in place. Costs nothing; gradients of later
calls die earlier. The bits are the same: every element is computed from its own block alone.

Refuses, by leaving them as they are, calls whose gradient is not there yet when the first runs (where gradients are
released, each parameter is updated where its own is complete), and calls whose parameter or state is touched in
between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphopt.ir.list_calls import join_list_calls
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass


@dataclass(frozen=True)
class BatchUpdates(Pass):
    """One call for the updates of many parameters."""

    name: ClassVar[str] = "batch-updates"
    stage: ClassVar[Stage] = Stage.STEP
    numerics: ClassVar[Numerics] = Numerics.EXACT
    in_place: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("reuse-last-use",)

    def apply(self, program: Program) -> Changes:
        return Changes(join_list_calls(program))
