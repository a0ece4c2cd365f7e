"""Compute the head's weight gradient where it is first needed, if that is at the end of the backward part.

A weight that is the embedding too has two gradients: the loss makes one at once, the lookup the other at the very end.

Before::

    back = graphopt.linear_cross_entropy_backward.default(tangent, None, lse, rows, head, ..., [True, True, False])
    hidden_grad, head_grad: 'f32[V,D]' = back[0], back[1]
    ...                                                  # the backward of all layers, while head_grad waits
    gradient = aten.add.Tensor(head_grad, lookup_grad)

After::

    back = graphopt.linear_cross_entropy_backward.default(tangent, None, lse, rows, head, ..., [True, False, False])
    hidden_grad = back[0]
    ...
    late = graphopt.linear_cross_entropy_backward.default(tangent, None, lse, rows, head, ..., [False, True, False])
    gradient = aten.add.Tensor(late[1], lookup_grad)

Saves ``V * D * itemsize`` bytes during the backward of the layers, for ``N * D`` of the rows. Costs the logits once
more, ``2 * N * V * D`` FLOPs. The late call takes pieces of about 4 MiB of logits, as it runs beside a whole gradient.

Numerics: a weight's gradient is computed for some classes at a time, each from all rows. How many at a time may change
the order in which a matrix product sums.

Runs when a policy that computes again or a budget asks for less memory. Refuses gradients that are needed at once, that
are outputs, or that several calls read; and, under a budget, to act when the budget holds without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.linear_loss import BACKWARD, named_arguments
from graphopt.ir.program import Program, Stage
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal
from graphopt.planner.room import Room

_HIDDEN, _WEIGHT = 0, 1

_PIECE_BYTES = 4 * 2**20
"""Logits that the late call holds at a time: what a second-level cache holds in parts, and little beside a gradient."""

_FEWEST_CLASSES = 256
"""Classes of a piece at least: products of fewer columns are slow."""


@dataclass(frozen=True)
class DeferHeadGradient(Pass):
    """See the module's docstring. ``budget`` and the bytes beside it: see ``Room``."""

    budget: int | str | Fraction | None = None
    reserved_bytes: int = 0
    margin_bytes: int = 0

    name: ClassVar[str] = "defer-head-gradient"
    stage: ClassVar[Stage] = Stage.STEP
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def apply(self, program: Program) -> Changes:
        count = 0
        refusals: list[Refusal] = []
        for node in program.ops():
            if not _gives_both(node):
                continue
            reader = _first_reader(node)
            objection = _objection(program, node, reader) or Room(
                self.budget, self.reserved_bytes, self.margin_bytes
            ).objection(program)
            if objection is None and reader is not None:
                _defer(program, node, reader)
                count += 1
            else:
                refusals.append(Refusal.at(node, str(objection)))
        return Changes(count, tuple(refusals))


def _gives_both(node: fx.Node) -> bool:
    """Whether ``node`` is a fused loss's backward for the hidden rows and the weight."""
    if not ops.is_call(node, BACKWARD):
        return False
    needs = named_arguments(node)["needs"]
    return bool(needs[_HIDDEN] and needs[_WEIGHT])


def _result(node: fx.Node, position: int) -> fx.Node | None:
    return next((user for user in node.users if user.args[1] == position), None)


def _first_reader(node: fx.Node) -> fx.Node | None:
    """The call that reads the weight's gradient, through conversions; None if it is an output or has several."""
    value = _result(node, _WEIGHT)
    while value is not None and len(value.users) == 1:
        (user,) = value.users
        if user.op == "output":
            return None
        if not ops.is_conversion(user):
            return user
        value = user
    return None


def _objection(program: Program, node: fx.Node, reader: fx.Node | None) -> str | None:
    """Why the weight's gradient of ``node`` is not deferred, or None; ``reader``: see ``_first_reader``."""
    if reader is None:
        return "the weight's gradient is an output, or several calls read it"
    hidden = _result(node, _HIDDEN)
    if hidden is None or not _leads_to(program, hidden, reader):
        return f"{reader.name} can use the weight's gradient at once"
    return None


def _leads_to(program: Program, source: fx.Node, target: fx.Node) -> bool:
    """Whether ``target`` is computed from ``source``."""
    reached = {source}
    for node in program.ops():
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
    return target in reached


def _defer(program: Program, node: fx.Node, reader: fx.Node) -> None:
    weight_gradient = _result(node, _WEIGHT)
    assert weight_gradient is not None, "it has a reader"
    for converted in _conversions(weight_gradient):
        reader.prepend(converted)
    arguments = named_arguments(node)
    now, later = list(arguments["needs"]), [False] * len(arguments["needs"])
    now[_WEIGHT], later[_WEIGHT] = False, True
    late_arguments = {**arguments, "chunk": _late_chunk(program, arguments), "needs": later}
    anchor = next(iter(weight_gradient.users))
    late = program.insert_before(anchor, BACKWARD, *late_arguments.values(), origin_of=node)
    result = program.insert_before(anchor, ops.getitem, late, _WEIGHT, origin_of=weight_gradient)
    program.take_over(weight_gradient, result)
    node.args, node.kwargs = tuple({**arguments, "needs": now}.values()), {}
    node.meta["val"] = program.infer(node)
    program.refresh()


def _conversions(value: fx.Node) -> tuple[fx.Node, ...]:
    """The chain of conversions behind ``value``, in order."""
    found: list[fx.Node] = []
    while len(value.users) == 1 and ops.is_conversion(user := next(iter(value.users))):
        found.append(user)
        value = user
    return tuple(found)


def _late_chunk(program: Program, arguments: dict[str, Any]) -> int:
    """Rows whose logits have the bytes of one piece; the pieces themselves are of all rows and some classes."""
    num_rows, num_classes = program.spec(arguments["hidden"]).shape[0], program.spec(arguments["weight"]).shape[0]
    num_elements = max(_PIECE_BYTES // program.spec(arguments["lse"]).dtype.itemsize, _FEWEST_CLASSES * num_rows)
    return int(min(arguments["chunk"], max(1, num_elements // num_classes)))
