"""Split linear: a linear layer is written as the matrix product that it is, in two dimensions.

Before::

    y: 'bf16[B,T,N]' = aten.linear.default(x, weight, bias)

After::

    rows: 'bf16[B*T,K]' = aten.view.default(x, [B*T, K])
    turned: 'bf16[K,N]' = aten.t.default(weight)
    product: 'bf16[B*T,N]' = aten.addmm.default(bias, rows, turned)
    y: 'bf16[B,T,N]' = aten.view.default(product, [B, T, N])

So a forward that is not differentiated has the products that it has in training, which differentiation splits in the
same way; what decides about products then finds them. Saves and costs nothing: ``linear`` does the same inside itself,
but a device may sum in another order.

Refuses a bias that is no vector of the results, and a result that is not contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitLinear(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "split-linear"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def apply(self, program: Program) -> Changes:
        """Split every linear layer."""
        count = 0
        refusals = []
        for node in program.ops():
            if not ops.is_call(node, aten.linear.default):
                continue
            objection = _objection(program, node)
            if objection is None:
                _split(program, node)
                count += 1
            else:
                refusals.append(Refusal.at(node, objection))
        if count:
            program.refresh()  # views of a layer's result share the memory of the product
        return Changes(count, tuple(refusals))


def _objection(program: Program, node: fx.Node) -> str | None:
    bias = ops.argument(node, 2, "bias")
    if not program.value(node).is_contiguous():
        return f"its result is {program.spec(node)}, not contiguous"
    if bias is not None and program.spec(bias).shape != program.spec(node).shape[-1:]:
        return f"its bias is {program.spec(bias)}, no vector of the results"
    return None


def _split(program: Program, node: fx.Node) -> None:
    args: Any = node.args
    x, weight = args[:2]
    bias = ops.argument(node, 2, "bias")
    shape = program.spec(x).shape
    if not program.value(x).is_contiguous():
        x = program.insert_before(node, aten.clone.default, x, memory_format=torch.contiguous_format)
    rows = program.insert_before(node, aten.view.default, x, [math.prod(shape[:-1]), shape[-1]])
    turned = program.insert_before(node, aten.t.default, weight)
    if bias is None:
        product = program.insert_before(node, aten.mm.default, rows, turned)
    else:
        product = program.insert_before(node, aten.addmm.default, bias, rows, turned)
    program.take_over(node, program.insert_before(node, aten.view.default, product, list(program.spec(node).shape)))
