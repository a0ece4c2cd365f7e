"""Whether a value of the forward part may reach the backward part with the three or four digits that FP8 keeps.

The error of a code is relative to the number itself. A backward operator that multiplies by the value passes that error
on as it is; one that takes an exponential of it, subtracts it from something near it, or compares it, does not. One
that jumps or divides by it does not either: what is small beside the number that made the scale has the code of zero.

Attention's backward does both. What comes of its values and what comes of its output are equal where one position has
all the weight, and only their difference reaches the queries: with either in FP8 that difference is noise
(``python -m benchmarks.fp8_saved --attention`` shows it).
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.kept_values import ForwardValue, LateUse
from graphopt.ir.linear_loss import BACKWARD as LINEAR_LOSS_BACKWARD
from graphopt.ir.liveness import backward_nodes, reached_from
from graphopt.ir.precision_ops import Role, is_small_power, role
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind
from graphopt.operators.fp8 import MATMUL

LOSS_REASON = "the gradient of the loss itself is made from it"

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LEAST_COLUMNS = 16
"""Values with fewer elements in a row are statistics of rows, or weights of them."""
_PRODUCTS = (MATMUL, LINEAR_LOSS_BACKWARD, torch.ops.aten.convolution_backward.default)
_OF_NORMALISATION = frozenset({"input"})


class Fp8Tolerance:
    """What each value of one Program bears; the analyses behind it are made once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        inputs = tuple(zip(program.placeholders(), program.signature.inputs, strict=True))
        varying = (InputKind.BATCH, InputKind.SEED)
        learned = [
            node
            for node, entry in inputs
            if entry.kind is InputKind.PARAM or (entry.kind is InputKind.BATCH and _is_float(node))
        ]
        self._varying = reached_from(program, [node for node, entry in inputs if entry.kind in varying])
        self._learned = reached_from(program, learned)
        self._draws = _draws(program)
        self._gradients = backward_nodes(program)
        self._behind_products = _behind_products(program, self._gradients)

    def is_activation(self, node: fx.Node) -> bool:
        """Whether ``node`` holds floats that depend on the batch and on what is learned: no weight, mask or table."""
        return _is_float(node) and node in self._varying and node in self._learned

    def objection(self, value: ForwardValue, uses: Iterable[LateUse]) -> str | None:
        """Why the ``uses`` of ``value`` must read it as it was made, or None."""
        return self._of_the_value(value.base) or next(filter(None, map(self._of_a_use, uses)), None)

    def _of_the_value(self, base: fx.Node) -> str | None:
        maker = base.args[0] if ops.is_getitem(base) else base
        assert isinstance(maker, fx.Node), f"{base.name} picks a result of no call"
        if ops.is_softmax(maker):
            return "the result of a softmax"
        if maker in self._draws:
            return "a random draw"
        if ops.is_getitem(base) and base.args[1] != 0:
            return "a statistic of a kernel"
        shape = self._program.spec(base).shape
        return "statistics of rows" if not shape or shape[-1] < _LEAST_COLUMNS else None

    def _of_a_use(self, use: LateUse) -> str | None:
        user = use.user
        if ops.is_attention_backward(user):
            return _objection_of_attention(use)
        if ops.is_normalisation_backward(user) and set(ops.argument_names(user, use.value)) <= _OF_NORMALISATION:
            return None if user in self._behind_products else LOSS_REASON
        if ops.is_matmul(user):
            return f"the product {user.name} reads it, which is not in FP8"
        if ops.is_conversion(user) and _is_float(user):
            return self._of_readers(user)
        return self._of_pointwise(use)

    def _of_readers(self, node: fx.Node) -> str | None:
        """The objection of the first call that objects to what ``node`` makes of the value."""
        readers = [user for user in node.users if user.op != "output"]
        return next(filter(None, (self._of_a_use(LateUse(user, node)) for user in readers)), None)

    def _of_pointwise(self, use: LateUse) -> str | None:
        user = use.user
        if not ops.is_pointwise(user):
            return f"{user.name} reads it, which is not known to bear it"
        if not _is_float(user):
            return f"{user.name} compares it"
        if ops.jumps(user):
            return f"{user.name} jumps between numbers beside each other"
        if ops.divides_by(user, use.value):
            return f"{user.name} divides by it, and small numbers may be read back as zero"
        if ops.subtracts_from_one(user):
            return f"{user.name} subtracts it from one"
        if role(user) is Role.ADDS:
            return f"{user.name} adds to it, and its error may be large beside the sum"
        if role(user) is Role.SENSITIVE and not is_small_power(user):
            return f"{user.name} is steep"
        if user not in self._gradients:  # part of a derivative, before the gradient is multiplied by it
            return self._of_readers(user)
        return None if user in self._behind_products else LOSS_REASON


def _objection_of_attention(use: LateUse) -> str:
    names = set(ops.argument_names(use.user, use.value))
    if names & {"query", "key"}:
        return "attention's queries and keys: their error would go through an exponential"
    if names & {"value", "out"}:
        return "attention's values and output: its backward takes the difference of what comes of the two"
    return f"attention's {', '.join(sorted(names)) or 'operand'}"


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATS


def _draws(program: Program) -> Set[fx.Node]:
    """Calls that draw random numbers, and those that compute from draws and constants alone."""
    found: set[fx.Node] = set()
    for node in program.ops():
        varying = [argument for argument in node.all_input_nodes if argument.op != "get_attr"]
        if ops.is_random(node) or (varying and found.issuperset(varying)):
            found.add(node)
    return found


def _behind_products(program: Program, gradients: Set[fx.Node]) -> Set[fx.Node]:
    """Gradients with a matrix product between them and the loss."""
    products = [
        node for node in program.ops() if node in gradients and (ops.is_matmul(node) or ops.is_call(node, *_PRODUCTS))
    ]
    return reached_from(program, products)
