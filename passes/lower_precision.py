"""Lower a forward graph to mixed precision: matrix work in two bytes, what is sensitive in float32.

Before::

    linear: 'f32[B,T,D]' = aten.linear.default(x, weight)
    exp: 'f32[B,T,D]' = aten.exp.default(linear)

After (compute=bf16)::

    _to_copy: 'bf16[D,D]' = aten._to_copy.default(weight, dtype=torch.bfloat16)     # one for all readers
    linear: 'bf16[B,T,D]' = aten.linear.default(x, _to_copy)
    _to_copy_1: 'f32[B,T,D]' = aten._to_copy.default(linear, dtype=torch.float32)
    exp: 'f32[B,T,D]' = aten.exp.default(_to_copy_1)

Each operator has a role (``graphopt/ir/precision_ops.py``), each value a kind, and the two decide
(``graphopt/ir/precision_rules.py``). Matrix products, convolutions, attention and recurrent layers run in the compute
type. Steep functions, losses and every operator that is not known get float32; reductions read two bytes and sum in
float32. Kernels that compute in float32 inside (normalisations, softmax, average pooling) stay whole. Tables (what
derives from buffers, positions and constants alone) and what is neither float32 nor of two bytes are untouched. All
else follows its operands; where float32 meets the compute type it is computed in float32, and what keeps the result for
the backward part keeps it in the compute type.

Saves half of what the backward part keeps and of the traffic of matrix products. Costs a cast of each weight.
Parameters, running statistics and outputs keep their dtypes.

Numerics: lossy. Each lowered result is rounded to 8 (bfloat16) or 11 (float16) bits.

Refuses matrix products in modules that ``keep_fp32`` names (patterns with ``|`` between them), and those that a buffer
takes part in and no parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from graphopt.errors import UnsupportedError
from graphopt.ir.lowering import Lowering
from graphopt.ir.precision_table import PrecisionTable
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LOWERS_SUMS = {"auto": None, "compute": True, "fp32": False}


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """See the module's docstring. ``residual``: the type of sums through layers, as in ``graphopt.Precision``."""

    name: ClassVar[str] = "lower-precision"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    after: ClassVar[tuple[str, ...]] = ("restore-attention", "fuse-linear-loss")

    compute: str = "bf16"
    keep_fp32: str = ""
    residual: str = "auto"

    def __post_init__(self) -> None:
        for option, known in (("compute", _DTYPES), ("residual", _LOWERS_SUMS)):
            value = getattr(self, option)
            if value not in known:
                raise UnsupportedError(f"lower-precision: {option} expects one of {sorted(known)}, came {value!r}")

    def apply(self, program: Program) -> Changes:
        """Lower every operator once; a program that was lowered before is left as it is."""
        if program.precision.rows:
            return Changes(0)
        dtype = _DTYPES[self.compute]
        lowers_sums = _LOWERS_SUMS[self.residual]
        lowering = Lowering(
            program,
            dtype,
            patterns=tuple(filter(None, self.keep_fp32.split("|"))),
            # A sum in float16 may leave its range; bfloat16 has that of float32.
            lowers_sums=dtype is torch.bfloat16 if lowers_sums is None else lowers_sums,
        )
        count = lowering.run()
        program.precision = PrecisionTable(self.compute, lowering.rows)
        refusals = tuple(Refusal.at(node, reason) for node, reason in lowering.declined)
        return Changes(count, refusals)
