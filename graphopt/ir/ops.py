"""Facts about operators, stated once: passes ask here and never keep op lists of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from graphopt.ir import op_tables as tables

aten = torch.ops.aten
getitem = operator.getitem


def is_call(node: fx.Node, *targets: Callable[..., Any]) -> bool:
    """Whether ``node`` calls one of ``targets`` (any function when none is given)."""
    return node.op == "call_function" and (not targets or node.target in targets)


def is_getitem(node: fx.Node) -> bool:
    """Whether ``node`` picks one element of a multi-output operator."""
    return is_call(node, operator.getitem)


def is_scalar_op(node: fx.Node) -> bool:
    """Whether ``node`` is arithmetic on Python numbers."""
    return node.op == "call_function" and node.target in tables.SCALAR_OPS


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
    if op is None or op in tables.NEVER_RANDOM:
        return False
    if torch.Tag.nondeterministic_seeded not in op.tags and op not in tables.RANDOM_ONLY_IF:
        return False
    rule = tables.RANDOM_ONLY_IF.get(op)
    if rule is None:
        return True
    position, name, idle = rule
    return argument(node, position, name, idle) != idle


def draws_by_shape(node: fx.Node) -> bool:
    """Whether ``node`` draws numbers that depend on the shape and the layout of its argument, not on its content."""
    return overload(node) in tables.DRAWS_BY_SHAPE


def is_coin_toss(node: fx.Node) -> bool:
    """Whether ``node`` draws zeros and ones."""
    return overload(node) in tables.COIN_TOSSES


def mutated_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The argument nodes that ``node`` writes into, from its schema (and where the schema does not tell)."""
    op = overload(node)
    # A target that is no operator, such as a compiled region, has no schema and says by itself what it writes.
    for position in () if op is not None else getattr(node.target, "written_arguments", ()):
        yield node.args[position]  # type: ignore[misc]
    if writes_running_statistics(node):
        yield from (item for item in node.args[3:5] if isinstance(item, fx.Node))
    if op is None or not op._schema.is_mutable:
        return
    for position, schema_argument in enumerate(op._schema.arguments):
        if schema_argument.alias_info is None or not schema_argument.alias_info.is_write:
            continue
        value = argument(node, position, schema_argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        yield from (item for item in values if isinstance(item, fx.Node))


def writes_running_statistics(node: fx.Node) -> bool:
    """Whether ``node`` is a normalisation that writes its running statistics though its schema does not say so."""
    if overload(node) not in tables.WRITES_RUNNING_STATISTICS:
        return False
    has_statistics = isinstance(argument(node, 3, "running_mean"), fx.Node)
    return has_statistics and argument(node, 5, "training", False) is not False


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
    if op in tables.EFFECTS or writes_running_statistics(node):
        return True
    return op._schema.is_mutable or not op._schema.returns


def is_view(node: fx.Node) -> bool:
    """Whether the schema says that the result shares the memory of the first argument without writing it."""
    op = overload(node)
    if op is None or op._schema.is_mutable or not op._schema.returns:
        return False
    return any(result.alias_info is not None for result in op._schema.returns)


def behind_views(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, through all views of views; ``node`` itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_uninitialised(node: fx.Node) -> bool:
    """Whether the result is memory with no defined content."""
    return overload(node) in tables.UNINITIALISED


def is_transfer(node: fx.Node) -> bool:
    """Whether ``node`` starts a copy to or from far memory, or waits for one: never merged, repeated or cloned."""
    return overload(node) in tables.TRANSFERS


def is_page_in(node: fx.Node) -> bool:
    """Whether ``node`` starts to fetch state from far memory: never merged or repeated."""
    return overload(node) in tables.PAGE_INS


def is_paged_update(node: fx.Node) -> bool:
    """Whether ``node`` updates a parameter whose state lies in far memory."""
    return overload(node) in tables.PAGED_UPDATES


def is_factory(node: fx.Node) -> bool:
    """Whether ``node`` makes a tensor from sizes and numbers alone (``zeros``, ``arange``, ...)."""
    return overload(node) in tables.FACTORIES


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on one element of each argument, after broadcasting."""
    op = overload(node)
    return op is not None and (torch.Tag.pointwise in op.tags or op in tables.UNTAGGED_POINTWISE)


def overwritable_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Arguments whose memory may take the result of ``node`` while it runs, if nothing else needs them."""
    if is_pointwise(node):
        return tensor_arguments(node)
    if overload(node) in tables.SCATTERS and isinstance(node.args[0], fx.Node):
        return (node.args[0],)
    return ()


def widened_argument(node: fx.Node) -> fx.Node | None:
    """The argument that ``node`` reads element by element in bfloat16, float16 or float32, and widens; or None."""
    place = tables.WIDENS_ARGUMENT.get(overload(node))  # type: ignore[arg-type]
    found = None if place is None else argument(node, *place)
    return found if isinstance(found, fx.Node) else None


def is_conversion(node: fx.Node) -> bool:
    """Whether ``node`` copies its argument, element by element, to another dtype or device."""
    return overload(node) is aten._to_copy.default


def is_expand(node: fx.Node) -> bool:
    """Whether ``node`` repeats its argument along dimensions of size 1, without a copy."""
    return overload(node) is aten.expand.default


def keeps_order(node: fx.Node) -> bool:
    """Whether the result holds the elements of the first argument in the same row-major order, in another shape."""
    return overload(node) in tables.ORDER_KEEPING


def is_matmul(node: fx.Node) -> bool:
    """Whether ``node`` is a matrix product."""
    return overload(node) in tables.MATMULS


def is_fp8_cast(node: fx.Node) -> bool:
    """Whether ``node`` makes FP8 codes of a matrix, or a matrix of FP8 codes."""
    return overload(node) in tables.FP8_CASTS


def is_fp8_matmul(node: fx.Node) -> bool:
    """Whether ``node`` is a product of two matrices in FP8."""
    return overload(node) in tables.FP8_MATMULS


def is_attention(node: fx.Node) -> bool:
    """Whether ``node`` is a fused attention product."""
    return overload(node) in tables.ATTENTION


def is_attention_backward(node: fx.Node) -> bool:
    """Whether ``node`` is the backward of a fused attention product."""
    return overload(node) in tables.ATTENTION_BACKWARD


def is_normalisation_backward(node: fx.Node) -> bool:
    """Whether ``node`` is the backward of a layer, group or RMS normalisation."""
    return overload(node) in tables.NORMALISATION_BACKWARD


def is_softmax(node: fx.Node) -> bool:
    """Whether ``node`` is a softmax or its logarithm."""
    return overload(node) in tables.SOFTMAX


def subtracts_from_one(node: fx.Node) -> bool:
    """Whether ``node`` is a backward operator that computes with one minus the forward result."""
    return overload(node) in tables.NEAR_ONE


def jumps(node: fx.Node) -> bool:
    """Whether ``node`` is pointwise and its result jumps where an operand passes some number."""
    return overload(node) in tables.JUMPS


def divides_by(node: fx.Node, value: fx.Node) -> bool:
    """Whether ``node`` is a quotient of tensors and ``value`` the divisor."""
    return overload(node) in (aten.div.Tensor, aten.true_divide.Tensor) and node.args[1] is value


def argument_names(node: fx.Node, value: fx.Node) -> tuple[str, ...]:
    """Under which names of its schema ``node`` reads ``value`` as a whole argument."""
    op = overload(node)
    if op is None:
        return ()
    given = [(entry.name, argument(node, i, entry.name)) for i, entry in enumerate(op._schema.arguments)]
    return tuple(name for name, held in given if held is value)


def is_normalised_row(node: fx.Node) -> bool:
    """Whether ``node`` is the main result of a layer or RMS normalisation: a reduction over rows, then pointwise."""
    if not is_getitem(node) or node.args[1] != 0:
        return False
    return overload(node.args[0]) in tables.ROW_NORMALISATIONS  # type: ignore[arg-type, operator]


def copied_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose elements are the result, or None.

    If the result has the argument's shape and dtype, the two are equal in every bit. Covers copies, views that keep
    the order, casts, ``cat`` of one tensor that is not empty, and dropout that is not training.
    """
    if not node.args:
        return None
    op, first = overload(node), node.args[0]
    if is_getitem(node):
        return first.args[0] if _is_idle_dropout(first) and node.args[1] == 0 else None  # type: ignore
    if op is aten.copy.default:
        first = node.args[1]
    elif op is aten.cat.default:
        filled = [item for item in first if item.meta["val"].numel()]  # type: ignore
        first = filled[0] if len(filled) == 1 else None
    elif op is aten.dropout.default:
        first = None if is_random(node) else first
    elif op not in tables.COPIES and not keeps_order(node):
        return None
    return first if isinstance(first, fx.Node) else None


def _is_idle_dropout(node: Any) -> bool:
    return is_call(node, aten.native_dropout.default) and not is_random(node)


def stops_gradient(node: fx.Node) -> bool:
    """Whether no gradient flows through ``node`` though its result has the argument's elements."""
    return is_call(node, aten.detach.default, aten.detach_copy.default)


def is_reshape(node: fx.Node) -> bool:
    """Whether ``node`` gives the elements of its argument, in row-major order, the shape of its second argument."""
    return overload(node) in tables.RESHAPES


def arithmetic(node: fx.Node) -> str | None:
    """The arithmetic: ``add``, ``sub`` (with ``alpha``), ``mul``, ``div`` (with ``rounding_mode``) or ``pow``."""
    return tables.ARITHMETIC.get(overload(node))  # type: ignore[arg-type]


def undoes_itself(node: fx.Node) -> bool:
    """Whether applying ``node``'s operator twice gives the first argument again (if the dtype is the same)."""
    return overload(node) in tables.INVOLUTIONS


def fill_value(node: fx.Node) -> Any:
    """The one number that all elements of a factory's result have (a node when it is computed), or None."""
    op = overload(node)
    if op in tables.FILLS_WITH_ARGUMENT:
        return argument(node, tables.FILLS_WITH_ARGUMENT[op], "fill_value")
    return tables.FILLS_WITH.get(op)  # type: ignore[arg-type]


def is_pure(node: fx.Node) -> bool:
    """Whether two calls with equal arguments give equal values and leave no trace."""
    if is_getitem(node) or is_scalar_op(node):
        return True
    op = overload(node)
    if op is None:
        return False
    starts_copy = is_transfer(node) or is_page_in(node)
    return not (is_random(node) or has_effect(node) or is_uninitialised(node) or starts_copy)


def tensor_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Argument nodes of ``node``, each once, in order of first use."""
    return tuple(dict.fromkeys(node.all_input_nodes))
