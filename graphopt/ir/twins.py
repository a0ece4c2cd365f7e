"""Calls that run again: how they are named, so that dumps, reports and counts find them."""

from __future__ import annotations

import re

from torch import fx

SUFFIX = "again"
_TWIN = re.compile(rf"(?P<original>.+)_{SUFFIX}(_\d+)?")


def is_twin(node: fx.Node) -> bool:
    """Whether ``node`` computes a value of the forward part again."""
    return _TWIN.fullmatch(node.name) is not None


def original_name(node: fx.Node) -> str:
    """The name of the value that ``node`` computes again; its own name if it does not."""
    match = _TWIN.fullmatch(node.name)
    return match["original"] if match else node.name
