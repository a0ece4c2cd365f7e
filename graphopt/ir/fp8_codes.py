"""The FP8 codes that a program makes of a value: which call makes them, how they lie, and how to make them again."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.fp8_grids import ONE_SCALE, Grid, transposed
from graphopt.ir.program import Program
from graphopt.ir.twins import insert_twin
from graphopt.operators.fp8 import (
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_DELAYED,
    QUANTIZE_DELAYED_BOTH,
    QUANTIZE_TRANSPOSED,
)

aten = torch.ops.aten

CODE_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


@dataclass(frozen=True)
class _Layout:
    """Where a call has codes of one layout: in which results codes and scale lie, and in which argument their grid.

    ``scale``, ``grid``: None where the scale is an argument, which then is one for the whole tensor.
    """

    codes: int
    scale: int | None
    grid: int | None
    is_transposed: bool

    def grid_in(self, call: fx.Node) -> Grid:
        """The grid of the codes that ``call`` makes, as they lie."""
        if self.grid is None:
            return ONE_SCALE
        given: Any = call.args[self.grid]
        rows, columns = given
        return rows, columns


_LAYOUTS: dict[Any, tuple[_Layout, ...]] = {
    QUANTIZE: (_Layout(0, 1, 2, False),),
    QUANTIZE_TRANSPOSED: (_Layout(0, 1, 2, True),),
    QUANTIZE_BOTH: (_Layout(0, 1, 2, False), _Layout(2, 3, 3, True)),
    QUANTIZE_DELAYED: (_Layout(0, None, None, False),),
    QUANTIZE_DELAYED_BOTH: (_Layout(0, None, None, False), _Layout(1, None, None, True)),
}


@dataclass(frozen=True)
class Codes:
    """Codes of the matrix ``source`` (of its transpose: ``is_transposed``) that ``call`` makes, with their ``scale``.

    ``grid``: of the codes as they lie. ``parts``: the results of ``call`` that belong to them.
    """

    call: fx.Node
    source: fx.Node
    codes: fx.Node
    scale: fx.Node
    grid: Grid
    is_transposed: bool
    parts: tuple[fx.Node, ...]

    @property
    def format(self) -> str:
        """The format's name."""
        return "e5m2" if self.codes.meta["val"].dtype is torch.float8_e5m2 else "e4m3"

    @property
    def lasting_scale(self) -> fx.Node | None:
        """The scale that ``make_again`` reads; None where it makes a new one.

        One scale for a tensor is not looked for again. That of the transpose is the same.
        """
        if self.grid != ONE_SCALE:
            return None
        return (_result(self.call, 1) or self.scale) if self.call.target is QUANTIZE_BOTH else self.scale


def is_quantize(node: fx.Node) -> bool:
    """Whether ``node`` makes FP8 codes of its first argument."""
    return node.op == "call_function" and node.target in _LAYOUTS


def finds_scales(node: fx.Node) -> bool:
    """Whether ``node`` makes codes with scales that it finds in its argument, none that it is given."""
    return is_quantize(node) and all(layout.scale is not None for layout in _LAYOUTS[node.target])


def matrix_grids(call: fx.Node) -> tuple[Grid, ...]:
    """How the matrix that a quantize ``call`` reads is divided for scales, once for each layout of codes."""
    grids = ((layout.grid_in(call), layout.is_transposed) for layout in _LAYOUTS[call.target])
    return tuple(transposed(grid) if is_transposed else grid for grid, is_transposed in grids)


def makes_both_layouts(node: fx.Node) -> bool:
    """Whether ``node`` makes codes of its argument and of the transpose."""
    return is_quantize(node) and len(_LAYOUTS[node.target]) > 1


def codes_of(call: fx.Node) -> Iterator[Codes]:
    """The codes that something reads of a quantize ``call``, each with its scale."""
    source: Any = call.args[0]
    for layout in _LAYOUTS[call.target]:
        codes, given = _result(call, layout.codes), call.args[1]
        scale = given if layout.scale is None else _result(call, layout.scale)
        if codes is None or not isinstance(scale, fx.Node):
            continue
        parts = (codes,) if layout.scale is None else (codes, scale)
        yield Codes(call, source, codes, scale, layout.grid_in(call), layout.is_transposed, parts)


def _result(call: fx.Node, position: int) -> fx.Node | None:
    return next((user for user in call.users if ops.is_getitem(user) and user.args[1] == position), None)


def make_again(program: Program, codes: Codes, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The same codes and scale, bit by bit, made again from their source before ``anchor``."""
    call, scale = codes.call, codes.lasting_scale
    if scale is not None:
        matrix = codes.source
        if codes.is_transposed:
            matrix = insert_twin(program, anchor, call, aten.t.default, matrix)
        fresh = insert_twin(program, anchor, call, QUANTIZE_DELAYED, matrix, scale, codes.format)
        return insert_twin(program, anchor, codes.codes, operator.getitem, fresh, 0), scale
    target = QUANTIZE_TRANSPOSED if codes.is_transposed else QUANTIZE
    fresh = insert_twin(program, anchor, call, target, codes.source, codes.format, list(codes.grid), call.args[-1])
    first, second = (
        insert_twin(program, anchor, part, operator.getitem, fresh, i) for i, part in enumerate(codes.parts)
    )
    return first, second


def make_one_layout(program: Program, call: fx.Node) -> bool:
    """Let a call that makes codes in both layouts, of which one is read, make that one alone; whether it did."""
    if not makes_both_layouts(call) or not call.users:
        return False
    for part in tuple(call.users):
        program.erase_if_unused(part)
    read = tuple(codes_of(call))
    is_delayed = call.target is QUANTIZE_DELAYED_BOTH
    if len(read) != 1 or len(call.users) > len(read[0].parts) + is_delayed:
        return False
    (kept,) = read
    return _narrow_delayed(program, kept) if is_delayed else _narrow(program, kept)


def _narrow(program: Program, kept: Codes) -> bool:
    target = QUANTIZE_TRANSPOSED if kept.is_transposed else QUANTIZE
    call = program.insert_before(
        kept.call, target, kept.source, kept.format, list(kept.grid), kept.call.args[-1], origin_of=kept.call
    )
    for i, part in enumerate(kept.parts):
        part.args = (call, i)
    program.take_over(kept.call, call)
    return True


def _narrow_delayed(program: Program, kept: Codes) -> bool:
    matrix = kept.source
    if kept.is_transposed:
        matrix = program.insert_before(kept.call, aten.t.default, matrix, origin_of=kept.call)
    call = program.insert_before(kept.call, QUANTIZE_DELAYED, matrix, kept.scale, kept.format, origin_of=kept.call)
    for part in tuple(kept.call.users):
        part.args = (call, 0 if part is kept.codes else 1)
    program.take_over(kept.call, call)
    return True
