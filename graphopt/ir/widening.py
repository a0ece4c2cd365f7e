"""Conversions to a wider floating-point type: exact, so that extremes of the wide copy are those of its source."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program

# Types of one byte are no part of this: torch neither promotes them nor finds their largest value.
_COMPARABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_widening(program: Program, node: fx.Node) -> bool:
    """Whether ``node`` converts floating-point numbers of two bytes or more to a type that holds all of them."""
    if not ops.is_conversion(node):
        return False
    narrow, wide = program.spec(node.all_input_nodes[0]).dtype, program.spec(node).dtype
    return narrow in _COMPARABLE and wide in _COMPARABLE and torch.promote_types(narrow, wide) == wide


def before_widening(program: Program, node: fx.Node) -> fx.Node:
    """What ``node`` is widened from on its device; itself if it is not.

    Who needs only the extremes of a gradient asks this, and leaves the wide copy to the update: a gradient that waits
    for all others then waits as it was computed.
    """
    while is_widening(program, node):
        source = node.all_input_nodes[0]
        if program.spec(source).device != program.spec(node).device:
            break
        node = source
    return node
