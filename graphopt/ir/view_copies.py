"""Readers of a value and of its views read another value in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from graphopt.ir.erase import erase_dead
from graphopt.ir.kept_values import LateUse
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


def read_instead(program: Program, uses: Iterable[LateUse], anchor: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    """Let ``uses`` read what ``made`` has in the place of what they read, or views of it, made before ``anchor``.

    What nobody reads any more is gone; what is made is remembered in ``made``.
    """
    for use in uses:
        again = view_again(program, use.value, anchor, made)
        if again is not use.value:
            use.user.replace_input_with(use.value, again)
            erase_dead(program, (use.value,))
