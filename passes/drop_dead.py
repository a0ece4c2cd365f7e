"""Drop what nothing needs: calls and constants that no output, no effect and no random draw depends on.

Before::

    wide: 'f32[8,32000]' = aten.mm.default(hidden, head)      # an output that was not asked for
    loss: 'f32[]' = aten.sum.default(hidden)
    return (loss,)

After::

    loss: 'f32[]' = aten.sum.default(hidden)
    return (loss,)

Saves: the bytes of every dropped value while it lived, its time, and the bytes of constants that only it read. Longer
still: an input of a dropped call may die earlier.
Costs: nothing.

Roots are all outputs (user outputs, gradients, updates of buffers, parameters and state), calls with an effect (writes,
assertions, running statistics), and every random draw.

Refuses: a random draw that nothing needs, with all that it reads. All draws of a step take numbers from one generator,
so dropping one shifts every later draw: those of this step, and, because the generator lives on, all of the next step.
The last draw of a step is therefore no exception. "With one seed, dropout equals eager's" holds over many steps only if
each step takes from the generator exactly what eager takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.pipeline.pass_base import Changes, Pass, Refusal


@dataclass(frozen=True)
class DropDead(Pass):
    """Dead code elimination."""

    name: ClassVar[str] = "drop-dead"

    def apply(self, program: Program) -> Changes:
        """Erase dead calls and constants; users come after what they use, so one walk from the end finds all."""
        num_dropped = 0
        refusals = []
        for node in reversed((*program.constants(), *program.ops())):
            if node.users:
                continue
            if _is_root(node):
                refusals += _draw_refusal(node)
                continue
            program.erase_if_unused(node)
            num_dropped += 1
        return Changes(num_dropped, tuple(reversed(refusals)))


def _is_root(node: fx.Node) -> bool:
    return ops.has_effect(node) or ops.is_random(node)


def _draw_refusal(node: fx.Node) -> list[Refusal]:
    if ops.has_effect(node):
        return []
    return [
        Refusal.at(node, "nothing needs this random draw, but without it all later draws would differ from eager's")
    ]
