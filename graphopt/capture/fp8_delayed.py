"""From scales of present values to scales of earlier ones: the delayed form of each quantize operator.

Before::

    quantize_fp8 = graphopt.quantize_fp8.default(x, 'e4m3', [0, 0], False)
    codes, scale = quantize_fp8

After (``known``: f32[1,1], from what was seen in earlier micro-steps)::

    first = graphopt.fp8_first_scale.default(x, known, 'e4m3', 0, False)   # known, or of x where nothing is known
    codes, amax = graphopt.quantize_fp8_delayed.default(x, first, 'e4m3')
    scale = first + (amax - amax)                                          # NaN if x holds Inf or NaN

Codes saturate, Inf too; the scale that products read becomes NaN then, so that what is not finite stays so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.capture.fp8_tensors import QuantizedTensor
from graphopt.fp8 import Delayed
from graphopt.ir import ops
from graphopt.ir.fp8_codes import matrix_grids
from graphopt.ir.fp8_grids import ONE_SCALE
from graphopt.ir.program import Program
from graphopt.kernels.fp8_format import format_named
from graphopt.operators.fp8 import (
    QUANTIZE_BOTH,
    QUANTIZE_DELAYED,
    QUANTIZE_DELAYED_BOTH,
    QUANTIZE_TRANSPOSED,
)
from graphopt.operators.fp8_history import FIRST_SCALE, HISTORY_SCALES

aten = torch.ops.aten


def is_delayable(tensor: QuantizedTensor) -> bool:
    """Whether every quantizer of ``tensor`` has one scale for all of it."""
    return all(grid == ONE_SCALE for node in tensor.quantizers for grid in matrix_grids(node))


def history_scales(
    program: Program, history: fx.Node, tensors: Sequence[QuantizedTensor], recipe: Delayed, anchor: fx.Node
) -> fx.Node:
    """f32[T], put before ``anchor``: the scales of ``tensors`` from their rows of ``history`` f32[T,H]."""
    return program.insert_before(
        anchor,
        HISTORY_SCALES,
        history,
        [format_named(tensor.format).largest for tensor in tensors],
        recipe.margin,
        recipe.algo == "most_recent",
        recipe.power_of_two,
    )


def delay(program: Program, scales: fx.Node, tensors: Sequence[QuantizedTensor], recipe: Delayed) -> dict[str, fx.Node]:
    """Let ``tensors`` be quantized by ``scales`` f32[T]; by name, the largest absolute value of each, f32[]."""
    return {tensor.name: _Delayer(program, recipe, tensor).delay(scales, i) for i, tensor in enumerate(tensors)}


@dataclass
class _Delayer:
    """Rewrites the quantizers of one tensor."""

    program: Program
    recipe: Delayed
    tensor: QuantizedTensor

    def delay(self, scales: fx.Node, row: int) -> fx.Node:
        first, *others = self.tensor.quantizers
        known = self._emit(first, aten.select.int, scales, 0, row)
        known = self._emit(first, aten.view.default, known, [1, 1])
        recipe = self.recipe
        scale = self._emit(
            first, FIRST_SCALE, first.args[0], known, self.tensor.format, recipe.margin, recipe.power_of_two
        )
        amax, codes = self._codes(first, scale)
        nothing = self._emit(first, aten.sub.Tensor, amax, amax)
        visible = self._emit(first, aten.add.Tensor, scale, nothing)
        self._replace(first, codes, visible)
        for other in others:
            self._replace(other, self._codes(other, scale)[1], visible)
        return amax

    def _emit(self, node: fx.Node, target: object, *args: object) -> fx.Node:
        return self.program.insert_before(node, target, *args)  # type: ignore[arg-type]

    def _codes(self, node: fx.Node, scale: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """The largest value of what ``node`` quantizes, and its codes in the layouts that ``node`` gives."""
        x = node.args[0]
        if node.target is QUANTIZE_BOTH:
            made = self._emit(node, QUANTIZE_DELAYED_BOTH, x, scale, self.tensor.format)
            codes, turned, amax = (self._emit(node, operator.getitem, made, i) for i in range(3))
            return amax, (codes, turned)
        if node.target is QUANTIZE_TRANSPOSED:
            x = self._emit(node, aten.t.default, x)
        made = self._emit(node, QUANTIZE_DELAYED, x, scale, self.tensor.format)
        codes, amax = (self._emit(node, operator.getitem, made, i) for i in range(2))
        return amax, (codes,)

    def _replace(self, node: fx.Node, codes: tuple[fx.Node, ...], scale: fx.Node) -> None:
        """Let those who read results of ``node`` read ``codes`` and ``scale``; names of codes stay."""
        made = codes[0].all_input_nodes[0]
        taken: set[fx.Node] = set()
        for user in list(node.users):
            assert ops.is_getitem(user), f"{user.name} reads the tuple {node.name}"
            position: Any = user.args[1]
            layout, is_scale = divmod(position, 2)
            if is_scale or codes[layout] in taken:
                self.program.replace(user, scale if is_scale else codes[layout])
                continue
            taken.add(codes[layout])
            self.program.take_over(user, codes[layout])
        self.program.take_over(node, made)
