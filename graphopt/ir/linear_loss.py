"""Calls of the operators that compute a linear layer and its cross-entropy together: arguments and chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.errors import ProgramError
from graphopt.ir import ops
from graphopt.ir.program import Program
from graphopt.operators.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_backward,
    linear_cross_entropy_with_gradient,
)
from graphopt.operators.linear_loss_math import MEAN, NONE, SUM

LOSS = linear_cross_entropy._opoverload
BACKWARD = linear_cross_entropy_backward._opoverload
WITH_GRADIENT = linear_cross_entropy_with_gradient._opoverload

# Results of LOSS by position; WITH_GRADIENT gives the same three first, then those of BACKWARD.
LOSS_RESULT, TOTAL_RESULT, LSE_RESULT = range(3)
NUM_LOSS_RESULTS = 3

FEWEST_ROWS = 128
"""Rows of a chunk at least: with fewer, the weight's gradient, which each chunk reads and writes whole, takes more time
than the products (2 shared CPU cores, 1,022 x 768 x 32,000 in float32, fastest of three rounds: 32 rows 1.20 s, 64 rows
0.93 s, 128 and 256 rows 0.81 s)."""

_SHARE_OF_WEIGHT_GRADIENT = 1 / 8
"""Logits may take this share of the bytes of the weight's gradient, which lives at the same time anyway."""

_FEWEST_PIECES = 4
"""Pieces of many rows at least: a quarter of the logits is held at most."""

__all__ = ["BACKWARD", "LOSS", "MEAN", "NONE", "SUM", "WITH_GRADIENT"]


def is_linear_loss(node: fx.Node) -> bool:
    """Whether ``node`` gives the loss of a linear layer and its cross-entropy, with or without the gradient."""
    return ops.is_call(node, LOSS, WITH_GRADIENT)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of one of the three operators by name."""
    op = ops.overload(node)
    if op not in (LOSS, BACKWARD, WITH_GRADIENT):
        raise ProgramError(
            f"expected a linear cross-entropy, came {node.name} ({node.target}); ask is_linear_loss first"
        )
    assert op is not None
    return {
        argument.name: ops.argument(node, position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
    }


def chunk_of(node: fx.Node) -> int:
    """How many rows of logits ``node`` holds at a time."""
    return int(named_arguments(node)["chunk"])


def set_chunk(program: Program, node: fx.Node, rows: int) -> None:
    """Let ``node`` hold ``rows`` rows of logits at a time; memory and rounding change, nothing else."""
    if rows < 1:
        raise ProgramError(f"a chunk has at least 1 row, came {rows} for {node.name}")
    arguments = {**named_arguments(node), "chunk": int(rows)}
    node.args, node.kwargs = tuple(arguments.values()), {}
    node.meta["val"] = program.infer(node)
    program.refresh()


def logits_bytes(num_rows: int, num_classes: int) -> int:
    """Bytes of logits in float32, the dtype that they are computed in."""
    return num_rows * num_classes * torch.float32.itemsize


def default_chunk(num_rows: int, num_classes: int, num_features: int) -> int:
    """Rows whose logits take the bytes of the hidden gradient and a share of the weight's.

    Both gradients are alive when the chunk is. FEWEST_ROWS at least, and beyond that a quarter of the rows at most.
    """
    free_elements = num_features * (num_rows + _SHARE_OF_WEIGHT_GRADIENT * num_classes)
    rows = min(int(free_elements / max(num_classes, 1)), num_rows // _FEWEST_PIECES)
    return min(num_rows, max(FEWEST_ROWS, rows))
