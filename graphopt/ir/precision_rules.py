"""Which dtype the operands of an operator should have: from the role of the operator and the kinds of the operands."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import fx

from graphopt.ir import ops, precision_ops
from graphopt.ir.precision_ops import Role


class Kind(StrEnum):
    """What a value is to the rules.

    OTHER: neither float32 nor of two bytes. TABLE: from buffers, positions and constants alone. GIVEN: a parameter, or
    pointwise of parameters alone. RANGE: may hold numbers that the compute type does not (masks, batches). WIDE:
    float32 because it is sensitive. MIXED: computed in float32 of something low; whoever keeps it, keeps it low. LOW:
    of two bytes.
    """

    OTHER = "other"
    TABLE = "table"
    GIVEN = "given"
    RANGE = "range"
    WIDE = "wide"
    MIXED = "mixed"
    LOW = "low"


class Want(StrEnum):
    """LOW: in the compute type. WIDE: in float32. AS_MADE: as it is. KEPT_LOW: low if it is MIXED, else as it is.
    ORIGINAL: in the dtype of the model as it was captured.
    """

    LOW = "low"
    WIDE = "wide"
    AS_MADE = "as made"
    KEPT_LOW = "kept low"
    ORIGINAL = "original"


@dataclass(frozen=True)
class Rule:
    """``operands``: what the operator gets. ``result``: the kind of its result, if that is float32. ``first_alone``:
    the others are as made. ``sums_wide``: the type of the sum is given as an argument. ``settles``: the result is cast
    to the compute type at once, for all readers.
    """

    operands: Want
    result: Kind
    reason: str
    first_alone: bool = False
    sums_wide: bool = False
    settles: bool = False


def rule_of(node: fx.Node, kinds: Set[Kind], compute: torch.dtype, *, lowers_sums: bool) -> Rule:
    """The Rule of ``node`` whose float operands have ``kinds``; at least one is no table."""
    is_low = Kind.LOW in kinds or Kind.MIXED in kinds
    if has_number_beyond(node, compute):
        return Rule(Want.WIDE, Kind.RANGE, "holds a number that the compute type does not")
    role = precision_ops.role(node)
    if role is Role.POINTWISE or is_mild_power(node, compute):
        return _pointwise(node, kinds)
    match role:
        case Role.MATRIX:
            return Rule(Want.LOW, Kind.LOW, "matrix product")
        case Role.LINEAR_LOSS:
            reason = "fused loss: low rows, float32 logits, sums and gradient of the weight"
            return Rule(Want.LOW, Kind.WIDE, reason, first_alone=True)
        case Role.SENSITIVE:
            return Rule(Want.WIDE, Kind.WIDE, "sensitive: steep function")
        case Role.LOSS:
            return Rule(Want.WIDE, Kind.WIDE, "sensitive: loss")
        case Role.SUMS:
            return Rule(Want.AS_MADE, Kind.WIDE, "sensitive: reduction", sums_wide=is_low)
        case Role.WHOLE:
            kept = Rule(Want.KEPT_LOW, Kind.MIXED, "kernel computes in float32 inside, follows its input")
            return kept if is_low else Rule(Want.AS_MADE, Kind.MIXED, "float32 arrives")
        case Role.LOOKUP:
            return Rule(Want.AS_MADE, Kind.MIXED, "rows of a float32 table", settles=lowers_sums)
        case Role.ADDS:
            return _addition(kinds, lowers_sums=lowers_sums)
        case Role.MOVES:
            return _arrangement(node, kinds)
        case Role.CONVERTS:
            only = next(iter(kinds)) if len(kinds) == 1 else Kind.WIDE
            return Rule(Want.AS_MADE, Kind.WIDE if only is Kind.LOW else only, "the model converts here")
    return Rule(Want.ORIGINAL, Kind.WIDE, "not known: as the model has it")


def has_number_beyond(node: fx.Node, compute: torch.dtype) -> bool:
    """Whether a number in ``node`` is finite and beyond the range of ``compute``."""
    largest = torch.finfo(compute).max
    return any(math.isfinite(number) and abs(number) > largest for number in precision_ops.numbers_in_data(node))


def is_mild_power(node: fx.Node, compute: torch.dtype) -> bool:
    """Whether ``node`` is a square or cube that may follow its operand.

    Not in float16, whose range it may leave, nor where a reduction reads it: that is part of a variance.
    """
    if compute is torch.float16 or not precision_ops.is_small_power(node):
        return False
    return not any(precision_ops.is_reduction(user) for user in node.users)


def _pointwise(node: fx.Node, kinds: Set[Kind]) -> Rule:
    if Kind.LOW not in kinds and Kind.MIXED not in kinds:
        return Rule(Want.AS_MADE, strongest(kinds), "follows its float32 operands")
    if precision_ops.needs_one_dtype(node):
        return Rule(Want.LOW, Kind.LOW, "follows its operands, of which it takes one dtype alone")
    if Kind.RANGE in kinds:
        return Rule(Want.KEPT_LOW, Kind.RANGE, "float32 where a mask or an input arrives")
    reason = "follows its operands" if kinds <= {Kind.LOW, Kind.MIXED} else "float32 where such an operand arrives"
    return Rule(Want.KEPT_LOW, Kind.MIXED, reason)


def _addition(kinds: Set[Kind], *, lowers_sums: bool) -> Rule:
    if kinds == {Kind.LOW}:
        return Rule(Want.AS_MADE, Kind.LOW, "follows its operands")
    if Kind.LOW not in kinds and Kind.MIXED not in kinds:
        return Rule(Want.AS_MADE, strongest(kinds), "follows its float32 operands")
    if Kind.RANGE in kinds:
        return Rule(Want.AS_MADE, Kind.RANGE, "float32 where a mask or an input arrives")
    if lowers_sums and kinds == {Kind.LOW, Kind.MIXED}:
        return Rule(Want.AS_MADE, Kind.LOW, "sum through layers, rounded once", settles=True)
    return Rule(Want.AS_MADE, Kind.MIXED, "float32 where such an operand arrives")


def _arrangement(node: fx.Node, kinds: Set[Kind]) -> Rule:
    if ops.is_factory(node) or ops.is_uninitialised(node):
        return Rule(Want.KEPT_LOW, Kind.TABLE, "has the dtype of its argument")
    if len(kinds) == 1:
        return Rule(Want.AS_MADE, next(iter(kinds)), "follows its operands")
    if Kind.RANGE in kinds:
        return Rule(Want.WIDE, Kind.RANGE, "float32 where a mask or an input arrives")
    if Kind.LOW in kinds or Kind.MIXED in kinds:
        if Kind.WIDE in kinds:
            return Rule(Want.WIDE, Kind.MIXED, "float32 where such an operand arrives")
        return Rule(Want.LOW, Kind.LOW, "follows its operands")
    return Rule(Want.WIDE, strongest(kinds), "follows its float32 operands")


def strongest(kinds: Set[Kind]) -> Kind:
    """The kind of what is made of float32 operands of ``kinds``."""
    return next((kind for kind in (Kind.RANGE, Kind.WIDE, Kind.MIXED, Kind.GIVEN) if kind in kinds), Kind.TABLE)
