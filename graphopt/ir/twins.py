"""Calls that run again: how they are named, so that dumps, reports and counts find them."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from graphopt.ir.program import Program

SUFFIX = "again"
_TWIN = re.compile(rf"(?P<original>.+)_{SUFFIX}(_\d+)?")


def is_twin(node: fx.Node) -> bool:
    """Whether ``node`` computes a value of the forward part again."""
    return _TWIN.fullmatch(node.name) is not None


def original_name(node: fx.Node) -> str:
    """The name of the value that ``node`` computes again; its own name if it does not."""
    match = _TWIN.fullmatch(node.name)
    return match["original"] if match else node.name


def name_as_twin(program: Program, node: fx.Node, original: fx.Node) -> None:
    """Call ``node`` what computes the value of ``original`` again is called."""
    origin = program.origins.pop(node.name)
    node._rename(f"{original.name}_{SUFFIX}")
    program.origins[node.name] = origin


def insert_twin(
    program: Program, anchor: fx.Node, original: fx.Node, target: Any, *args: Any, **kwargs: Any
) -> fx.Node:
    """A new call before ``anchor`` on the way to the value of ``original`` again: it bears its origin and its name."""
    node = program.insert_before(anchor, target, *args, origin_of=original, **kwargs)
    name_as_twin(program, node, original)
    return node
