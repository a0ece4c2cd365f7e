"""Which elements of a relu's result are zero, one bit an element: all that the relu's own backward asks of it.

The bits are taken from the value as it was made. Codes in FP8 would not do: they have zeros of their own, where a
number is small beside the one that their scale was made for, and no gradient would pass there.
"""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.kept_values import ForwardValue, LateUse
from graphopt.ir.program import Program
from graphopt.ir.twins import insert_twin
from graphopt.operators.pack_bits import PACK_BITS, UNPACK_BITS

aten = torch.ops.aten


def has_zero_mask(program: Program, value: ForwardValue) -> bool:
    """Whether bits can be made of ``value`` from which ``asks_for_zeros`` calls find the same: a relu's whole result.

    It holds no negative number, so that above zero means other than zero; for NaN too, which is not below or at zero.
    """
    base = value.base
    if not ops.is_call(base, aten.relu.default) or program.spec(base).nbytes != value.nbytes:
        return False
    return bool(program.value(base).is_contiguous())


def asks_for_zeros(use: LateUse) -> bool:
    """Whether the reader asks only which elements are above zero: the backward of a relu."""
    user = use.user
    if not ops.is_call(user, aten.threshold_backward.default) or user.args[2] != 0:
        return False
    return ops.argument_names(user, use.value) == ("self",)


def pack_zeros(program: Program, base: fx.Node) -> fx.Node:
    """The bits of ``base``, made right behind it."""
    return program.insert_before(base.next, PACK_BITS, base, origin_of=base)


def zeros_again(program: Program, packed: fx.Node, base: fx.Node, anchor: fx.Node) -> fx.Node:
    """Ones where ``base`` is not zero, before ``anchor``; shape, dtype and layout are those of ``base``."""
    spec = program.spec(base)
    return insert_twin(program, anchor, base, UNPACK_BITS, packed, list(spec.shape), spec.dtype)
