"""Views of a value, made again on another value in its place."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt.ir.program import Program
from graphopt.ir.twins import insert_twin


def view_again(program: Program, value: fx.Node, anchor: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """``value`` again before ``anchor``, with the calls that lead to it from what ``made`` has a stand-in for.

    What is made is remembered in ``made``. ``value`` is a key of ``made``, or computed from one by first arguments.
    """
    if value in made:
        return made[value]
    source: Any = value.args[0]
    source = view_again(program, source, anchor, made)
    target: Any = value.target
    copy = insert_twin(program, anchor, value, target, source, *value.args[1:], **value.kwargs)
    made[value] = copy
    return copy
