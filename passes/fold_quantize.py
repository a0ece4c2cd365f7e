"""Fold quantize: what is quantized from what was dequantized is what it was; only the copies that are read are made.

Before::

    wide: 'bf16[M,K]' = graphopt.dequantize_fp8.default(codes, scale, [1, 128], bf16)
    again: '(f8e4m3[M,K], f32[M,K/128])' = graphopt.quantize_fp8.default(wide, 'e4m3', [1, 128], True)
    both: '(f8, f32, f8, f32)' = graphopt.quantize_fp8_both.default(x, 'e4m3', [1, 0], [1, 0], True)  # two are read

After (readers of ``again`` read ``codes`` and ``scale``)::

    both: '(f8e4m3[M,K], f32[M,1])' = graphopt.quantize_fp8.default(x, 'e4m3', [1, 0], True)

A pair is folded where format and grid are the same, and what lies in between has float32's range. Quantizing again
would find the same codes, as dequantizing rounds away at most 2**-9 of a number and the border to another code is at
least 2**-5 away; but it would compute a scale from rounded values, up to 2**-8 beside the one that was used. So folding
takes an error out and puts none in. With powers of two for scales the numbers are equal bit by bit (where the largest
code of a group is half of the largest there is, quantizing again would double the codes and halve the scale), unless
they lie below 2**-124.

Saves two passes over a value, one byte an element for each copy that is not read, and the value in between. Costs
nothing. Numerics: lossy, towards what was meant.

Refuses a pair in float16, whose range a value may have left; codes of the transpose, which lie in another order; and
what ``Merger`` in ir/merging.py refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.erase import erase_dead
from graphopt.ir.fp8_codes import Codes, codes_of, finds_scales, is_quantize, make_one_layout, makes_both_layouts
from graphopt.ir.fp8_products import is_transposition
from graphopt.ir.merging import Merger, same_tensor
from graphopt.ir.program import Program
from graphopt.operators.fp8 import DEQUANTIZE
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal, until_stable

_WIDE = (torch.bfloat16, torch.float32)
"""What may lie between: types with the range of float32."""


@dataclass(frozen=True)
class FoldQuantize(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fold-quantize"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def apply(self, program: Program) -> Changes:
        """Fold in graph order until nothing is left to fold."""
        folded = until_stable(program, _fold_once)
        narrowed = until_stable(program, _narrow_once)
        return Changes(folded.count + narrowed.count, folded.refusals)


def _fold_once(program: Program) -> Changes:
    merger = Merger(program)
    count = 0
    refusals: list[Refusal] = []
    for node in program.ops():
        merger.settle(node)
        for made in tuple(codes_of(node)) if finds_scales(node) else ():
            folded, objection = _fold(merger, made)
            count += folded
            if objection is not None:
                refusals.append(Refusal.at(node, objection))
    return Changes(count, tuple(refusals))


# ---- pairs -------------------------------------------------------------------------------------------------------


def _fold(merger: Merger, made: Codes) -> tuple[int, str | None]:
    """How many of codes and scale were replaced by those that were dequantized, and why they were not."""
    source, turns = _dequantized(made.source)
    if source is None:
        return 0, None
    args: Any = source.args
    codes, scale, grid = args[:3]
    if turns != made.is_transposed:
        return 0, f"codes of {codes.name} lie in another order"
    if tuple(grid) != made.grid:
        return 0, f"{codes.name} has its scales on the grid {list(grid)}, not {list(made.grid)}"
    if source.meta["val"].dtype not in _WIDE:
        return 0, f"{source.name} may have left the range of {source.meta['val'].dtype}"
    pairs = [(made.codes, codes), (made.scale, scale)]
    if not all(same_tensor(user, original) for user, original in pairs):
        return 0, f"{codes.name} is another format or lies differently in memory"
    objections = [merger.objection(user, original) for user, original in pairs]
    if any(objections):
        return 0, next(filter(None, objections))
    for user, original in pairs:
        merger.merge(user, original)
    return len(pairs), None


def _dequantized(value: fx.Node) -> tuple[fx.Node | None, bool]:
    """The dequantize operator that ``value`` is the result of, and whether it is its transpose; None for others."""
    turned = False
    while is_transposition(value):
        value, turned = value.all_input_nodes[0], not turned
    return (value if ops.is_call(value, DEQUANTIZE) else None), turned


# ---- copies that nobody reads ------------------------------------------------------------------------------------


def _narrow_once(program: Program) -> Changes:
    """Drop quantize operators that nobody reads, and of two layouts the one that nobody reads."""
    count = 0
    for node in program.ops():
        if not is_quantize(node):
            continue
        unread = [part for part in node.users if not part.users]
        if len(unread) == len(node.users):
            erase_dead(program, unread or [node])
            count += 1
        elif makes_both_layouts(node):
            # Parts that nobody reads go even where both layouts stay, which is a change of the text too.
            count += make_one_layout(program, node) or bool(unread)
    if count:
        program.refresh()
    return Changes(count)
