"""Facts about operators, stated once: passes ask here and never keep op lists of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

SCALAR_OPS: frozenset[Callable[..., Any]] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, max, min}
)
"""Arithmetic on Python numbers (learning rate, bias corrections); exact as Python computes it."""

# These draw from the generator only for some arguments; the position of the deciding argument and its idle value.
_RANDOM_ONLY_IF = {
    aten.scaled_dot_product_attention.default: (4, "dropout_p", 0.0),
    aten._scaled_dot_product_flash_attention.default: (3, "dropout_p", 0.0),
    aten._scaled_dot_product_efficient_attention.default: (5, "dropout_p", 0.0),
    aten._scaled_dot_product_cudnn_attention.default: (5, "dropout_p", 0.0),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (3, "dropout_p", 0.0),
    aten._scaled_dot_product_attention_math.default: (4, "dropout_p", 0.0),
    aten.native_dropout.default: (2, "train", False),
    aten.lstm.input: (5, "dropout", 0.0),
    aten.gru.input: (5, "dropout", 0.0),
}

# Tagged by torch as drawing random numbers, though they only use numbers drawn before.
_NEVER_RANDOM = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    }
)

# They check or announce something and return nothing that a graph could depend on.
_EFFECTS = frozenset(
    {
        aten._assert_async.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        aten._print.default,
    }
)

# The result is uninitialised memory: two calls are never the same value.
_UNINITIALISED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)

_MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.matmul.default,
        aten.linear.default,
        aten._grouped_mm.default,
    }
)

_ATTENTION = frozenset(
    {
        aten.scaled_dot_product_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)

_FACTORIES = frozenset(
    {
        aten.zeros.default,
        aten.zeros_like.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.full.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.scalar_tensor.default,
        aten.eye.default,
        aten.eye.m,
    }
)


def is_call(node: fx.Node, *targets: Callable[..., Any]) -> bool:
    """Whether ``node`` calls one of ``targets`` (any function when none is given)."""
    return node.op == "call_function" and (not targets or node.target in targets)


def is_getitem(node: fx.Node) -> bool:
    """Whether ``node`` picks one element of a multi-output operator."""
    return is_call(node, operator.getitem)


def is_scalar_op(node: fx.Node) -> bool:
    """Whether ``node`` is arithmetic on Python numbers."""
    return node.op == "call_function" and node.target in SCALAR_OPS


def overload(node: fx.Node) -> torch._ops.OpOverload | None:
    """The ATen (or custom) overload ``node`` calls, or None for getitem and scalar arithmetic."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """The argument at ``position`` or by ``name``, or ``default``."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def is_random(node: fx.Node) -> bool:
    """Whether running ``node`` draws random numbers (advances a generator)."""
    op = overload(node)
    if op is None or op in _NEVER_RANDOM:
        return False
    if torch.Tag.nondeterministic_seeded not in op.tags and op not in _RANDOM_ONLY_IF:
        return False
    rule = _RANDOM_ONLY_IF.get(op)
    if rule is None:
        return True
    position, name, idle = rule
    return argument(node, position, name, idle) != idle


def mutated_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The argument nodes that ``node`` writes into, from its schema."""
    op = overload(node)
    if op is None or not op._schema.is_mutable:
        return
    for position, schema_argument in enumerate(op._schema.arguments):
        if schema_argument.alias_info is None or not schema_argument.alias_info.is_write:
            continue
        value = argument(node, position, schema_argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        yield from (item for item in values if isinstance(item, fx.Node))


def is_mutating(node: fx.Node) -> bool:
    """Whether ``node`` writes into one of its arguments."""
    op = overload(node)
    return op is not None and op._schema.is_mutable


def has_effect(node: fx.Node) -> bool:
    """Whether ``node`` must run even if nothing uses its result."""
    if node.op != "call_function":
        return False
    op = overload(node)
    if op is None:
        return False
    return op in _EFFECTS or op._schema.is_mutable or not op._schema.returns


def is_view(node: fx.Node) -> bool:
    """Whether the schema says that the result shares the memory of the first argument without writing it."""
    op = overload(node)
    if op is None or op._schema.is_mutable or not op._schema.returns:
        return False
    return any(result.alias_info is not None for result in op._schema.returns)


def is_uninitialised(node: fx.Node) -> bool:
    """Whether the result is memory with no defined content."""
    return overload(node) in _UNINITIALISED


def is_factory(node: fx.Node) -> bool:
    """Whether ``node`` makes a tensor from sizes and numbers alone (``zeros``, ``arange``, ...)."""
    return overload(node) in _FACTORIES


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on one element of each argument, after broadcasting."""
    op = overload(node)
    return op is not None and torch.Tag.pointwise in op.tags


def is_matmul(node: fx.Node) -> bool:
    """Whether ``node`` is a matrix product."""
    return overload(node) in _MATMULS


def is_attention(node: fx.Node) -> bool:
    """Whether ``node`` is a fused attention product."""
    return overload(node) in _ATTENTION


def is_pure(node: fx.Node) -> bool:
    """Whether two calls with equal arguments give equal values and leave no trace."""
    if is_getitem(node) or is_scalar_op(node):
        return True
    op = overload(node)
    if op is None:
        return False
    return not (is_random(node) or has_effect(node) or is_uninitialised(node))


def tensor_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Argument nodes of ``node``, each once, in order of first use."""
    return tuple(dict.fromkeys(node.all_input_nodes))
