"""Decide for every matrix product of the step, forward and backward, whether it runs in FP8, and say why.

Before: ``program.fp8`` is empty. After: it has a row for each product, with a reason; ``insert-quantize`` acts on it.
The graph itself is not changed.

Saves nothing by itself; see ``insert-quantize``. Costs nothing in the step.

Refuses: products of two activations (attention), products inside modules that the recipe excludes, and products whose
dimensions are not multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from graphopt.fp8 import Recipe, recipe_of
from graphopt.ir.fp8_products import Product, ProductRole, find_products
from graphopt.ir.fp8_table import Fp8Row, Fp8Table
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass

_MULTIPLE = 16


@dataclass(frozen=True)
class TagFp8(Pass):
    """See the module's docstring. ``recipe``: a ``graphopt.fp8`` value or its name."""

    recipe: Recipe | str = "tensorwise"

    name: ClassVar[str] = "tag-fp8"
    stage: ClassVar[Stage] = Stage.JOINT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def apply(self, program: Program) -> Changes:
        """Fill the table; a program that has one is left as it is."""
        if program.fp8.rows:
            return Changes(0)
        recipe = recipe_of(self.recipe)
        rows = tuple(_row(program, product, recipe) for product in find_products(program))
        program.fp8 = Fp8Table(recipe.name, "", rows)
        return Changes(0)


def _row(program: Program, product: Product, recipe: Recipe) -> Fp8Row:
    module = program.origin(product.node).module
    reason = _objection(product, module, recipe)
    return Fp8Row(
        product.node.name,
        product.role,
        product.rows,
        product.columns,
        product.contraction,
        reason is None,
        reason or "eligible",
        program.origin(product.node),
        product.weights,
    )


def _objection(product: Product, module: str, recipe: Recipe) -> str | None:
    if product.role is ProductRole.OTHER:
        return "not a product with a weight"
    if any(fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*") for pattern in recipe.exclude):
        return "excluded by name"
    if recipe.weight_gradient == "bf16" and product.role is ProductRole.WEIGHT_GRADIENT:
        return "weight gradients are asked for in bfloat16"
    if product.contraction % _MULTIPLE or product.columns % _MULTIPLE:
        return f"a dimension is no multiple of {_MULTIPLE}"
    return None
