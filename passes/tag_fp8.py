"""Decide for every matrix product of the step, forward and backward, whether it runs in FP8, and say why.

Before: ``program.fp8`` is empty. After: it has a row for each product, with a reason::

    forward mm_4 (8192 x 14336 x 4096): FP8: saves time on H100 (estimated rates); 1,393.6 us in bf16, 698.5 us in ...
    forward mm_9 (8192 x 4 x 4096): not FP8: router: its result goes into a softmax over 4 columns

``insert-quantize`` acts on it. The graph itself is not changed.

Forward, input gradient and weight gradient of a layer are decided each by itself. Rules come first: names and the
predicate of the recipe, dtypes, heads, routers, first and last layers, sizes. Then costs of the device that runs, or of
``target``: an operand is quantized once for all products that read it, so all products are chosen together, by a
minimum cut (``graphopt/planner/fp8_choice.py``). On a CPU FP8 is emulation, and costs are not counted.

Saves nothing by itself; see ``insert-quantize``. Costs nothing in the step.

Refuses, each with the reason that its row has, every product that stays in two bytes: those of two activations
(attention) always; those that are excluded, of the wrong sizes, or faster as they are. Refuses an option that names
nothing in the program, too: a forward that is evaluated may lack a module that training runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphopt.fp8 import Recipe, recipe_of
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal
from graphopt.planner.fp8_decide import decide_products
from graphopt.planner.fp8_rules import idle_options


@dataclass(frozen=True)
class TagFp8(Pass):
    """See the module's docstring. ``recipe``: a ``graphopt.fp8`` value or its name. ``micro_steps``: of an update,
    which one quantization of a weight serves.
    """

    recipe: Recipe | str = "tensorwise"
    micro_steps: int = 1

    name: ClassVar[str] = "tag-fp8"
    stage: ClassVar[Stage] = Stage.JOINT
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def apply(self, program: Program) -> Changes:
        """Fill the table; a program that has one is left as it is."""
        if program.fp8.rows:
            return Changes(0)
        recipe = recipe_of(self.recipe)
        program.fp8 = decide_products(program, recipe, micro_steps=self.micro_steps)
        declined = [Refusal(row.value, row.reason) for row in program.fp8.rows if not row.is_fp8]
        idle = idle_options(recipe, [row.module for row in program.fp8.rows])
        return Changes(0, (*declined, *(Refusal(option, reason) for option, reason in idle.items())))
