"""Values of a Program by dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from graphopt.ir.program import Program


def by_dtype(program: Program, values: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """``values``, a list for each dtype: a stack of several dtypes would be copied value by value on CUDA."""
    groups: dict[torch.dtype, list[fx.Node]] = {}
    for value in values:
        groups.setdefault(program.spec(value).dtype, []).append(value)
    return list(groups.values())
