"""torch.autocast and ``precision=`` side by side: what each matrix product, normalisation and loss runs in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.api import capture, optimize
from graphopt.ir.precision_ops import Role, role
from graphopt.ir.program import Program
from graphopt.ir.spec import dtype_name
from graphopt.ir.storage import tensors_in
from graphopt.ir.text import target_text
from graphopt.precision import Precision, precision_for, precision_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPARED = (Role.MATRIX, Role.WHOLE, Role.SUMS, Role.LOSS)


@dataclass(frozen=True)
class AutocastRow:
    """One operator: ``autocast`` and ``ours`` are the dtypes of its result, ``reason`` why ours is what it is."""

    operator: str
    module: str
    is_product: bool
    autocast: str
    ours: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator:42} {self.autocast:>5} {self.ours:>5}  {self.reason:40} {self.module}"


def autocast_table(
    model: torch.nn.Module,
    batch: Any,
    *,
    outputs: Sequence[str] | None = None,
    precision: str | Precision = "bf16",
    device: str = "cpu",
) -> tuple[AutocastRow, ...]:
    """The AutocastRows of ``model`` on ``batch``, in order; arguments as those of ``graphopt.capture``.

    Attention and losses are compared as the model calls them, before any other pass.
    """
    asked = precision_for(model, precision_of(precision))
    plain = capture(model, batch, outputs=outputs)
    options = f"compute={asked.compute},keep_fp32={'|'.join(asked.keep_fp32)},residual={asked.residual}"
    lowered = optimize(plain, f"lower-precision{{{options}}}")
    with torch.autocast(device, dtype=_DTYPES[asked.compute]):
        reference = capture(model, batch, outputs=outputs)
    reasons = {row.value: row.reason for row in lowered.precision.rows}
    ours, theirs = _compared(lowered), _compared(reference)
    assert [node.target for node in ours] == [node.target for node in theirs], "the two captures differ in operators"
    return tuple(
        AutocastRow(
            operator=target_text(node.target),
            module=lowered.origin(node).module,
            is_product=role(node) is Role.MATRIX,
            autocast=_result_dtype(reference, twin),
            ours=_result_dtype(lowered, node),
            reason=reasons.get(node.name, ""),
        )
        for node, twin in zip(ours, theirs, strict=True)
    )


def _compared(program: Program) -> list[fx.Node]:
    return [node for node in program.ops() if role(node) in _COMPARED]


def _result_dtype(program: Program, node: fx.Node) -> str:
    return dtype_name(next(iter(tensors_in(program.value(node)))).dtype)
