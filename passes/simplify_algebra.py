"""Simplify algebra: arithmetic that provably changes no bit goes.

Before::

    scaled: 'f32[8,8]' = aten.mul.Tensor(hidden, 1.0)
    minus: 'f32[8,8]' = aten.neg.default(scaled)
    back: 'f32[8,8]' = aten.neg.default(minus)
    wide: 'f32[8,8]' = aten._to_copy.default(half, dtype=torch.float32)
    widest: 'f64[8,8]' = aten._to_copy.default(wide, dtype=torch.float64)

After (``back`` is ``hidden``)::

    widest: 'f64[8,8]' = aten._to_copy.default(half, dtype=torch.float64)

The rules, for real numbers, if the result has shape, dtype, strides and device of ``x``:

- ``x * 1``, ``1 * x``, ``x / 1``, ``x ** 1``; integers also rounded (``x // 1``)
- ``x - 0`` and ``x + -0.0``; integers also ``x + 0``. Not ``x + 0.0``: that turns -0.0 into 0.0.
- ``-(-x)``, ``not not x``, ``~~x``, where nothing else reads the inner result
- ``cast(cast(x))`` is one cast, or ``x``, where the inner cast loses nothing and nothing else reads its result
- ``(x * a) * b`` is ``x * (a * b)`` for ``a`` and ``b`` that are powers of two, at least 1: multiplying by them is
  exact up to the overflow, which comes at the same elements; below 1, denormal numbers would be rounded once for twice

1 and 0 are Python numbers or tensors that are provably filled with the number. Only 0 is 0: 1e-12 is not.

Saves: ``numel * itemsize`` bytes while the result and ``x`` both lived, and a pass over memory.
Costs: nothing; a value is read longer only in the place of one that is at least as large.

Refuses: ``x * 0``, ``x - x``, ``x / x`` and ``x + 0.0`` for floats, which depend on NaN, infinity and the sign of zero;
a result that broadcasts ``x`` or has another dtype; and what ``Merger`` in ir/merging.py refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.fake import is_fake
from graphopt.ir.merging import Merger, same_tensor
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Pass, Refusal, until_stable

Number = bool | int | float

_MAX_UNIFORM_ELEMENTS = 64
"""Constants up to this size are looked at: a cache line of bytes, so that compile time never grows with a constant."""


@dataclass(frozen=True)
class SimplifyAlgebra(Pass):
    """Arithmetic that changes nothing is replaced by its operand."""

    name: ClassVar[str] = "simplify-algebra"

    def apply(self, program: Program) -> Changes:
        """Simplify in graph order, so that each result is seen by all that follows."""
        return until_stable(program, _simplify_once)


def _simplify_once(program: Program) -> Changes:
    merger = Merger(program)
    uniform: dict[fx.Node, Number] = {}
    count = 0
    refusals = []
    for node in (*program.constants(), *program.ops()):
        merger.settle(node)
        _note_uniform(program, node, uniform)
        if not _is_real(node):
            continue
        unchanged = _unchanged_operand(node, uniform) or _undone(node) or _cast_back(program, node)
        objection = merger.objection(node, unchanged) if unchanged is not None else _tempting(node, uniform)
        if unchanged is not None and objection is None:
            merger.merge(node, unchanged)
            count += 1
            continue
        if objection is not None:
            refusals.append(Refusal.at(node, objection))
        count += _join_casts(program, merger, node) or _join_scales(program, merger, node)
    return Changes(count, tuple(refusals))


# ---- numbers -----------------------------------------------------------------------------------------------------


def _note_uniform(program: Program, node: fx.Node, uniform: dict[fx.Node, Number]) -> None:
    """Record the number that fills ``node``, if it is known and the dtype holds it exactly."""
    if not _is_real(node):
        return
    number = _small_constant(program, node) if node.op == "get_attr" else ops.fill_value(node)
    base = ops.copied_argument(node) or (node.args[0] if ops.is_expand(node) else None)
    if isinstance(base, fx.Node):
        number = uniform.get(base)
    if isinstance(number, (bool, int, float)) and number in (0, 1):
        uniform[node] = number if program.spec(node).dtype.is_floating_point else int(number)


def _small_constant(program: Program, node: fx.Node) -> Number | None:
    tensor = program.constant(node)
    if is_fake(tensor) or not 0 < tensor.numel() <= _MAX_UNIFORM_ELEMENTS:
        return None
    numbers = tensor.flatten().tolist()
    return numbers[0] if len({repr(number) for number in numbers}) == 1 else None


def _number(value: Any, uniform: dict[fx.Node, Number]) -> Number | None:
    """The number that ``value`` is or is filled with, or None."""
    return uniform.get(value) if isinstance(value, fx.Node) else value if isinstance(value, (int, float)) else None


def _is_real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_complex()


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


# ---- one operand is the result -----------------------------------------------------------------------------------


def _unchanged_operand(node: fx.Node, uniform: dict[fx.Node, Number]) -> fx.Node | None:
    """The operand that ``node`` equals bit by bit because the other is neutral, or None."""
    for operand, other, is_neutral in _neutral_roles(node):
        number = _number(other, uniform)
        if isinstance(operand, fx.Node) and number is not None and is_neutral(number) and same_tensor(node, operand):
            return operand
    return None


def _neutral_roles(node: fx.Node) -> Iterator[tuple[Any, Any, Callable[[Number], bool]]]:
    """(operand, other, whether a number as other makes the result the operand) for each operand."""
    if node.op != "call_function" or len(node.args) < 2:
        return
    left, right = node.args[:2]
    kind = ops.arithmetic(node)
    if kind == "mul":
        yield from ((left, right, _is_one), (right, left, _is_one))
    elif kind == "pow" or (kind == "div" and _divides_exactly(node)):
        yield (left, right, _is_one)
    elif kind in ("add", "sub"):
        yield from _sum_roles(node, left, right)


def _sum_roles(node: fx.Node, left: Any, right: Any) -> Iterator[tuple[Any, Any, Callable[[Number], bool]]]:
    alpha = ops.argument(node, 2, "alpha", 1)
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        return
    weight = -alpha if ops.arithmetic(node) == "sub" else alpha
    is_float = _is_float(node)
    yield (left, right, lambda number: _adds_nothing(number, weight, is_float=is_float))
    if weight == 1:
        yield (right, left, lambda number: _adds_nothing(number, 1, is_float=is_float))


def _adds_nothing(number: Number, weight: Number, *, is_float: bool) -> bool:
    """Whether ``x + weight * number`` is ``x`` for every ``x``: for floats, -0.0 is neutral and 0.0 is not."""
    if number != 0:
        return False
    return not is_float or math.copysign(1.0, float(weight) * float(number)) < 0


def _is_one(number: Number) -> bool:
    return number == 1


def _divides_exactly(node: fx.Node) -> bool:
    """Division by one rounds nothing unless it is told to round to an integer."""
    return node.kwargs.get("rounding_mode") is None or not _is_float(node)


def _undone(node: fx.Node) -> fx.Node | None:
    """``x`` if ``node`` is ``f(f(x))`` for an ``f`` that undoes itself, or None."""
    inner = node.args[0] if ops.undoes_itself(node) else None
    if not isinstance(inner, fx.Node) or inner.target is not node.target or len(inner.users) > 1:
        return None
    source = inner.args[0]
    return source if isinstance(source, fx.Node) and same_tensor(node, source) else None


# ---- casts of casts ----------------------------------------------------------------------------------------------


def _cast_back(program: Program, node: fx.Node) -> fx.Node | None:
    """``x`` if ``node`` casts a lossless cast of ``x`` back to the dtype of ``x``, or None."""
    source = _losslessly_cast(program, node)
    return source if source is not None and same_tensor(node, source) else None


def _join_casts(program: Program, merger: Merger, node: fx.Node) -> int:
    """Let a cast of a lossless cast read what that was cast from; the number of calls saved."""
    source = _losslessly_cast(program, node)
    if source is None or same_tensor(node, source):
        return 0
    inner = node.args[0]
    assert isinstance(inner, fx.Node), f"{node.name} casts no node"
    if _is_float(source) and not _is_float(node):  # what NaN becomes as an integer depends on the device and the path
        return 0
    if program.spec(source).stride != program.spec(inner).stride or merger.outgrows(source, inner):
        return 0
    if merger.reorders_gradients(node, source):
        return 0
    node.replace_input_with(inner, source)
    program.erase_if_unused(inner)
    return 1


def _losslessly_cast(program: Program, node: fx.Node) -> fx.Node | None:
    """``x`` if ``node`` is ``cast(cast(x))``, the inner cast keeps every value of ``x`` and only ``node`` reads it."""
    inner = node.args[0] if ops.is_conversion(node) else None
    if not isinstance(inner, fx.Node) or not ops.is_conversion(inner) or len(inner.users) > 1:
        return None
    source = inner.args[0]
    if not isinstance(source, fx.Node) or not _is_real(source):
        return None
    first, second, third = (program.spec(item) for item in (source, inner, node))
    if first.device != second.device or not _keeps_every_value(first.dtype, second.dtype):
        return None
    # The gradient takes the way back, from the third dtype over the second to the first.
    if program.stage is Stage.FORWARD and _is_float(source) and not _keeps_every_value(third.dtype, second.dtype):
        return None
    return source


def _keeps_every_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every number of ``source`` is a number of ``target``."""
    if source == target or source == torch.bool:
        return True
    if not source.is_floating_point and not target.is_floating_point:
        if target == torch.bool:
            return False
        return torch.iinfo(target).min <= torch.iinfo(source).min and torch.iinfo(source).max <= torch.iinfo(target).max
    if not target.is_floating_point or target.itemsize == 1 or (source.itemsize == 1 and source.is_floating_point):
        return False
    wide = torch.finfo(target)
    if not source.is_floating_point:
        return torch.iinfo(source).max <= min(2 / wide.eps, wide.max)
    narrow = torch.finfo(source)
    return wide.eps <= narrow.eps and wide.max >= narrow.max and wide.tiny * wide.eps <= narrow.tiny * narrow.eps


# ---- scales of scales --------------------------------------------------------------------------------------------


def _join_scales(program: Program, merger: Merger, node: fx.Node) -> int:
    """Let ``(x * a) * b`` be ``x * (a * b)`` for exact ``a`` and ``b``; the number of calls saved."""
    inner = node.args[0] if ops.arithmetic(node) == "mul" else None
    if not isinstance(inner, fx.Node) or inner.target is not node.target or len(inner.users) > 1:
        return 0
    source, first, second = inner.args[0], inner.args[1], node.args[1]
    if not isinstance(source, fx.Node) or not _scales_exactly(first) or not _scales_exactly(second):
        return 0
    if not same_tensor(source, inner) or not same_tensor(inner, node) or not _is_float(node):
        return 0
    if first * second > torch.finfo(program.spec(node).dtype).max or merger.outgrows(source, inner):  # type: ignore
        return 0
    if merger.reorders_gradients(node, source):
        return 0
    joined = program.insert_before(node, node.target, source, first * second)  # type: ignore
    merger.substitute(node, joined)
    program.erase_if_unused(inner)
    return 1


def _scales_exactly(number: Any) -> bool:
    return isinstance(number, (int, float)) and 1 <= number < math.inf and math.frexp(number)[0] == 0.5


# ---- what looks like a rule and is none ---------------------------------------------------------------------------


def _tempting(node: fx.Node, uniform: dict[fx.Node, Number]) -> str | None:
    """Why float arithmetic that a reader may expect to go stays, or None."""
    if node.op != "call_function" or len(node.args) < 2 or not _is_float(node):
        return None
    left, right = node.args[:2]
    kind = ops.arithmetic(node)
    zeros = any(_number(operand, uniform) == 0 for operand in (left, right))
    if kind == "mul" and zeros:
        return "x * 0 is not 0 where x is NaN or infinite, and is -0.0 where x is negative"
    if kind in ("sub", "div") and left is right:
        return "x - x and x / x are NaN where x is NaN or infinite"
    if kind == "add" and zeros:
        return "x + 0.0 is 0.0 where x is -0.0"
    return None
