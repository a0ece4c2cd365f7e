"""Put quantize operators before the products that are tagged for FP8, and make them FP8 products.

Before (``mm`` is tagged, recipe tensorwise)::

    t: 'bf16[K,N]' = aten.t.default(low)                 # low: bf16 copy of weight f32[N,K]
    mm: 'bf16[M,N]' = aten.mm.default(x, t)

After::

    quantize_fp8 = graphopt.quantize_fp8.default(x, 'e4m3', [0, 0], False)
    codes: 'f8e4m3[M,K]', scale: 'f32[1,1]' = quantize_fp8
    quantize_fp8_1 = graphopt.quantize_fp8.default(weight, 'e4m3', [0, 0], False)
    mm: 'bf16[M,N]' = graphopt.fp8_matmul.default(codes, scale, [0, 0], t(codes_1), t(scale_1), [0, 0], None, bf16)

A value is quantized once for each format and grid that its readers need, right where it is made: so the backward part
reads the codes, one byte an element, and the value itself may die in the forward part. A weight is quantized from what
it is stored as, and its low-precision copy is not needed.

Saves ``K * M`` bytes of each activation that only products read. Costs one pass over each operand. Numerics: lossy;
E4M3 keeps 4 bits of each number, E5M2 3.

Refuses nothing: what is not eligible was not tagged.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from graphopt.errors import ProgramError
from graphopt.fp8 import Recipe, recipe_of
from graphopt.ir.erase import erase_dead
from graphopt.ir.fp8_grids import Grid, format_of, grid_of, transposed
from graphopt.ir.fp8_products import Operand, OperandKind, Product, find_products
from graphopt.ir.program import Program, Stage
from graphopt.operators.fp8 import MATMUL, QUANTIZE
from graphopt.pipeline.pass_base import Changes, Numerics, Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class InsertQuantize(Pass):
    """See the module's docstring. ``recipe``: a ``graphopt.fp8`` value or its name."""

    recipe: Recipe | str = "tensorwise"

    name: ClassVar[str] = "insert-quantize"
    stage: ClassVar[Stage] = Stage.JOINT
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    after: ClassVar[tuple[str, ...]] = ("tag-fp8",)

    def apply(self, program: Program) -> Changes:
        """Rewrite every tagged product that is still one."""
        tagged = {row.value for row in program.fp8.eligible}
        products = [product for product in find_products(program) if product.node.name in tagged]
        rewriter = _Rewriter(program, recipe_of(self.recipe))
        for product in products:
            rewriter.rewrite(product)
        return Changes(len(products))


@dataclass(frozen=True)
class _Quantized:
    """Codes and scales of a value, as it lies."""

    codes: fx.Node
    scale: fx.Node


@dataclass
class _Rewriter:
    """Rewrites products; remembers what is quantized already."""

    program: Program
    recipe: Recipe
    made: dict[tuple[fx.Node, str, Grid], _Quantized] = field(default_factory=dict)

    def rewrite(self, product: Product) -> None:
        """``product`` in FP8, under its name."""
        node = product.node
        a = self._read(product.a, 1, node)
        b = self._read(product.b, 0, node)
        dtype = self.program.spec(node).dtype
        fresh = self.program.insert_before(node, MATMUL, *a, *b, product.bias, dtype)
        if self.program.spec(fresh) != self.program.spec(node):
            raise ProgramError(f"{node.name} is {self.program.spec(node)}, in FP8 {self.program.spec(fresh)}")
        sources = node.all_input_nodes
        self.program.take_over(node, fresh)
        erase_dead(self.program, sources)

    def _read(self, operand: Operand, contraction_dim: int, reader: fx.Node) -> tuple[fx.Node, fx.Node, list[int]]:
        """Codes, scales and grid of ``operand`` as ``reader`` reads it."""
        grid = grid_of(self.recipe, operand.kind, contraction_dim)
        stored = transposed(grid) if operand.is_transposed else grid
        found = self._quantized(operand, stored, reader)
        if not operand.is_transposed:
            return found.codes, found.scale, list(grid)
        turned = (self.program.insert_before(reader, aten.t.default, value) for value in (found.codes, found.scale))
        return (*turned, list(grid))

    def _quantized(self, operand: Operand, grid: Grid, reader: fx.Node) -> _Quantized:
        kind = format_of(self.recipe, operand.kind)
        key = (operand.source, kind, grid)
        if key not in self.made:
            anchor = reader if operand.kind is OperandKind.WEIGHT else _behind(self.program, operand.source)
            pair = self.program.insert_before(
                anchor, QUANTIZE, operand.source, kind, list(grid), self.recipe.power_of_two, origin_of=operand.base
            )
            codes, scale = (
                self.program.insert_before(anchor, operator.getitem, pair, i, origin_of=operand.base) for i in (0, 1)
            )
            self.made[key] = _Quantized(codes, scale)
        return self.made[key]


def _behind(program: Program, node: fx.Node) -> fx.Node:
    """Where something that reads ``node`` can be put first."""
    if node.op == "call_function":
        return node.next
    return program.ops()[0]
