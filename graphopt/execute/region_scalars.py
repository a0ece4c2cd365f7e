"""Python numbers inside a region: they enter as 0-dim tensors, so that another learning rate needs no compilation.

An operator that wants a number where it now gets a tensor is replaced by others that take one:
``addcdiv(x, a, b, value=v)`` by ``x + v * (a / b)``, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops

aten = torch.ops.aten


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return aten.add.Tensor(x, aten.mul.Tensor(y, alpha))


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return aten.sub.Tensor(x, aten.mul.Tensor(y, alpha))


def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return aten.add.Tensor(x, aten.mul.Tensor(aten.sub.Tensor(end, x), weight))


def _addcmul(x: Any, left: Any, right: Any, *, value: Any) -> Any:
    return aten.add.Tensor(x, aten.mul.Tensor(aten.mul.Tensor(left, right), value))


def _addcdiv(x: Any, left: Any, right: Any, *, value: Any) -> Any:
    return aten.add.Tensor(x, aten.mul.Tensor(aten.div.Tensor(left, right), value))


def _clamp(x: Any, minimum: Any = None, maximum: Any = None) -> Any:
    x = x if minimum is None else aten.maximum.default(x, aten.add.Tensor(aten.zeros_like.default(x), minimum))
    return x if maximum is None else aten.minimum.default(x, aten.add.Tensor(aten.zeros_like.default(x), maximum))


_WITH_TENSORS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.clamp.default: _clamp,
}
"""For operators with arguments of type ``Scalar``: the same mathematics with 0-dim tensors in their place."""


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` holds a Python number."""
    return isinstance(node.meta["val"], (int, float))


def can_take_numbers(node: fx.Node) -> bool:
    """Whether the numbers that ``node`` reads can be given to it as 0-dim tensors."""
    if not any(is_number(argument) for argument in node.all_input_nodes):
        return True
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return ops.overload(node) in _WITH_TENSORS or not _number_arguments(node)


def call_with_tensors(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The result of ``node``'s operator on ``args`` and ``kwargs``, in which numbers have become 0-dim tensors."""
    if not any(is_number(argument) for argument in node.all_input_nodes):
        return node.target(*args, **kwargs)  # type: ignore[operator]
    expected = node.meta["val"].dtype
    # Numbers meet half precision in float32, as they do inside torch's kernels.
    dtype = torch.promote_types(expected, torch.float32)
    args, kwargs = _cast_numbers((node.args, node.kwargs), (args, kwargs), dtype)
    replacement = _WITH_TENSORS.get(node.target) if _number_arguments(node) else node.target
    assert callable(replacement), f"{node.target} takes no tensor in the place of a number"
    result = replacement(*args, **kwargs)
    return result if result.dtype == expected else aten._to_copy.default(result, dtype=expected)


def _number_arguments(node: fx.Node) -> list[str]:
    """Names of the arguments of type ``Scalar`` that get a number computed elsewhere."""
    op = ops.overload(node)
    assert op is not None, "regions hold operators alone"
    return [
        argument.name
        for position, argument in enumerate(op._schema.arguments)
        if isinstance(value := ops.argument(node, position, argument.name), fx.Node)
        and is_number(value)
        and "Tensor" not in str(argument.type)
    ]


def _cast_numbers(nodes: Any, values: Any, dtype: torch.dtype) -> Any:
    """``values`` with those cast to ``dtype`` that stand where ``nodes`` has a node holding a number."""
    if isinstance(nodes, fx.Node):
        return aten._to_copy.default(values, dtype=dtype) if is_number(nodes) else values
    if isinstance(nodes, dict):
        return {name: _cast_numbers(item, values[name], dtype) for name, item in nodes.items()}
    if isinstance(nodes, (tuple, list)):
        return type(nodes)(_cast_numbers(item, value, dtype) for item, value in zip(nodes, values, strict=True))
    return values
