"""How logits are made: the linear layer they come from, and what happens to them on the way to a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class LogitChain:
    """``product``: the call that multiplies ``hidden`` [...,D] and the weight; ``steps``: from there to the logits.

    ``weight``: [V,D], or [D,V] if ``is_transposed``. ``row_steps``: those of ``steps`` that choose or arrange rows.
    Logits are ``softcap * tanh(logit_scale * x / softcap)`` of the layer's result x; ``softcap`` 0.0: no capping.
    """

    product: fx.Node
    steps: tuple[fx.Node, ...]
    hidden: fx.Node
    weight: fx.Node
    is_transposed: bool
    bias: fx.Node | None
    logit_scale: float
    softcap: float

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All calls of the chain; the last one is the logits."""
        return (self.product, *self.steps)

    @property
    def row_steps(self) -> tuple[fx.Node, ...]:
        """The steps that choose or arrange rows."""
        return tuple(node for node in self.steps if ops.keeps_order(node) or ops.is_call(node, aten.slice.Tensor))


def read_logits(program: Program, logits: fx.Node) -> LogitChain | str:
    """The LogitChain that ends in ``logits`` [...,V], or the reason why there is none."""
    steps: list[fx.Node] = []
    node = logits
    while _product_arguments(program, node) is None:
        source = logit_source(program, node)
        if source is None:
            return f"logits come through {node.name} ({node.target}), not straight from a linear layer"
        steps.append(node)
        node = source
    steps.reverse()
    hidden, weight, is_transposed, bias = _product_arguments(program, node)  # type: ignore[misc]
    scales = _read_scales(program, node, steps, has_bias=bias is not None)
    if isinstance(scales, str):
        return scales
    return LogitChain(
        node, tuple(steps), hidden, weight, is_transposed, bias or scales.bias, scales.logit_scale, scales.softcap
    )


@dataclass(frozen=True)
class _Scales:
    bias: fx.Node | None
    logit_scale: float
    softcap: float


def _read_scales(program: Program, product: fx.Node, steps: list[fx.Node], *, has_bias: bool) -> _Scales | str:
    bias: fx.Node | None = None
    inner, outer, is_capped = 1.0, 1.0, False
    previous = product
    for step in steps:
        kind = ops.arithmetic(step)
        if kind == "add":
            if has_bias or bias is not None or is_capped or inner != 1.0:
                return f"{step.name} adds to logits that have a bias, a scale or a cap already"
            bias = next(other for other in step.args[:2] if other is not previous)  # type: ignore[assignment]
        elif kind in ("mul", "div"):
            number = float(step.args[1])  # type: ignore[arg-type]
            factor = number if kind == "mul" else 1 / number
            inner, outer = (inner, outer * factor) if is_capped else (inner * factor, outer)
        elif ops.is_call(step, aten.tanh.default):
            if is_capped:
                return f"{step.name} caps logits that are capped already"
            is_capped = True
        previous = step
    if is_capped and outer <= 0:
        return "logits are capped by a number that is not positive"
    return _Scales(bias, inner * outer, outer if is_capped else 0.0)


def logit_source(program: Program, node: fx.Node) -> fx.Node | None:
    """The argument that holds the logits before ``node``, if ``node`` treats them class by class."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if not isinstance(program.value(source), torch.Tensor) or not isinstance(program.value(node), torch.Tensor):
        return None
    before, after = program.spec(source), program.spec(node)
    if ops.is_conversion(node):
        is_wider = torch.promote_types(before.dtype, after.dtype) == after.dtype and after.dtype.is_floating_point
        return source if is_wider and before.device == after.device else None
    if ops.keeps_order(node):
        return source if before.shape[-1:] == after.shape[-1:] and before.dtype == after.dtype else None
    if ops.is_call(node, aten.slice.Tensor):
        dim = int(ops.argument(node, 1, "dim", 0))
        return source if dim % len(before.shape) != len(before.shape) - 1 else None
    if ops.is_call(node, aten.tanh.default):
        return source
    return _scaled_source(program, node)


def _scaled_source(program: Program, node: fx.Node) -> fx.Node | None:
    kind, arguments = ops.arithmetic(node), node.args
    if kind in ("mul", "div") and len(arguments) == 2 and not node.kwargs:
        number = arguments[1]
        is_factor = isinstance(number, (int, float)) and number != 0 and number == number
        return arguments[0] if is_factor else None  # type: ignore[return-value]
    if kind != "add" or len(arguments) != 2 or node.kwargs or not all(isinstance(item, fx.Node) for item in arguments):
        return None
    left, right = arguments
    shape = program.spec(node).shape
    if program.spec(left).shape == shape and program.spec(right).shape == shape[-1:]:  # type: ignore[arg-type]
        return left  # type: ignore[return-value]
    if program.spec(right).shape == shape and program.spec(left).shape == shape[-1:]:  # type: ignore[arg-type]
        return right  # type: ignore[return-value]
    return None


def _product_arguments(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node, bool, fx.Node | None] | None:
    """hidden, weight, whether the weight is [D,V], bias; None if ``node`` is no product with a matrix."""
    if ops.is_call(node, aten.linear.default):
        hidden, weight, bias = node.args[0], node.args[1], ops.argument(node, 2, "bias")
        is_transposed = False
    elif ops.is_call(node, aten.mm.default, aten.matmul.default):
        hidden, weight, bias, is_transposed = node.args[0], node.args[1], None, True
    elif ops.is_call(node, aten.addmm.default) and not node.kwargs:
        bias, hidden, weight = node.args[:3]
        is_transposed = True
    else:
        return None
    found: tuple[Any, Any] = (hidden, weight)
    if not all(isinstance(item, fx.Node) for item in found) or program.spec(found[1]).shape.__len__() != 2:
        return None
    if len(program.spec(found[0]).shape) < 2:
        return None
    num_classes = program.spec(node).shape[-1]
    if bias is not None and program.spec(bias).shape != (num_classes,):  # type: ignore[arg-type]
        return None
    return found[0], found[1], is_transposed, bias  # type: ignore[return-value]
