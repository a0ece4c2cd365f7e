"""The in-place or ``out=`` form of an operator call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program


def in_place_call(program: Program, node: fx.Node, operand: fx.Node) -> fx.Node | None:
    """A new call before ``node`` that computes the same into ``operand``'s memory; None if there is no such form.

    ``add(a, b)`` into ``a`` becomes ``add_(a, b)``; into ``b`` it becomes ``add.out(a, b, out=b)``.
    """
    op = ops.overload(node)
    if op is None:
        return None
    if node.args and node.args[0] is operand:
        target = _in_place_overload(op)
        if target is not None:
            return program.insert_before(node, target, *node.args, origin_of=node, **node.kwargs)
    found = _out_overload(op)
    if found is None:
        return None
    target, out_name = found
    return program.insert_before(node, target, *node.args, origin_of=node, **{**node.kwargs, out_name: operand})


def has_in_place_form(node: fx.Node, operand: fx.Node) -> bool:
    """Whether ``in_place_call`` finds a form that writes into ``operand``."""
    op = ops.overload(node)
    if op is None:
        return False
    if node.args and node.args[0] is operand and _in_place_overload(op) is not None:
        return True
    return _out_overload(op) is not None


def updated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """For an operator with several results of which each is the new value of an argument: those arguments, in order.

    Such operators are called ``x`` and ``x_``: the second takes the same arguments, writes them and returns nothing.
    """
    op = ops.overload(node)
    twin = None if op is None else _writing_twin(op)
    if op is None or twin is None:
        return ()
    positions = [i for i, argument in enumerate(twin._schema.arguments) if argument.alias_info is not None]
    found = tuple(ops.argument(node, i, twin._schema.arguments[i].name) for i in positions)
    return found if all(isinstance(argument, fx.Node) for argument in found) else ()


def writing_call(program: Program, node: fx.Node) -> fx.Node:
    """A new call before ``node`` that writes the results of ``node`` into its ``updated_arguments``."""
    op = ops.overload(node)
    twin = None if op is None else _writing_twin(op)
    assert twin is not None, f"{node.target} has no form that writes"
    return program.insert_before(node, twin, *node.args, origin_of=node, **node.kwargs)


@functools.cache
def _writing_twin(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator ``x_`` for an operator ``x`` with several results."""
    if len(op._schema.returns) < 2:
        return None
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    twin = getattr(packet, op._overloadname or "default", None) if packet is not None else None
    if twin is None or twin._schema.returns or _argument_types(twin._schema) != _argument_types(op._schema):
        return None
    written = [argument for argument in twin._schema.arguments if argument.alias_info is not None]
    return twin if len(written) == len(op._schema.returns) else None


@functools.cache
def _in_place_overload(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    target = getattr(packet, op._overloadname, None) if packet is not None else None
    if target is None or _argument_types(target._schema) != _argument_types(op._schema):
        return None
    return target


@functools.cache
def _out_overload(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    """The overload with the same arguments and one keyword tensor that it writes, and that keyword's name.

    Not one that torch generated: it makes the result in new memory and copies it, so nothing would be saved.
    """
    packet = op.overloadpacket
    for overload_name in packet.overloads():
        candidate = getattr(packet, overload_name)
        if torch.Tag.generated in candidate.tags:
            continue
        written = [argument for argument in candidate._schema.arguments if argument.alias_info is not None]
        if len(written) != 1 or not written[0].kwarg_only or not written[0].alias_info.is_write:
            continue
        plain = [kind for name, kind in _argument_types(candidate._schema) if name != written[0].name]
        if plain == [kind for _, kind in _argument_types(op._schema)]:
            return candidate, written[0].name
    return None


def _argument_types(schema: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]
