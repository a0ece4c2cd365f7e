"""Compute a fused loss and its gradient together, so that the logits are computed once.

Before::

    fused = graphopt.linear_cross_entropy.default(rows, head, ...)
    loss: 'f32[]', lse: 'f32[N]' = fused[0], fused[2]
    ...
    back = graphopt.linear_cross_entropy_backward.default(tangent, None, lse, rows, head, ...)

After::

    fused = graphopt.linear_cross_entropy_with_gradient.default(tangent, rows, head, ...)
    loss: 'f32[]', hidden_grad: 'f32[N,D]', head_grad: 'f32[V,D]' = fused[0], fused[3], fused[4]

Saves one product of four, ``2 * N * V * D`` FLOPs. Costs nothing where the backward follows the loss at once: the
gradients would be made next.

Numerics. The weight's gradient is summed over chunks of rows, where the separate backward sums over all rows at once.

Refuses where forward and backward run apart (a module whose user calls ``backward()`` later, with a gradient of their
own): that is seen by the program writing no parameter and no state. And where the loss has no reduction, where the
gradient of the loss is computed from the loss itself, where the log-sum-exp has a gradient too, and for weights in
lower precision, whose gradient would need a copy in float32. A weight's gradient that was deferred stays apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.erase import erase_dead
from graphopt.ir.hoist import hoist
from graphopt.ir.linear_loss import (
    BACKWARD,
    LOSS,
    LSE_RESULT,
    NONE,
    NUM_LOSS_RESULTS,
    WITH_GRADIENT,
    named_arguments,
)
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import OutputKind
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

_WRITTEN_BY_A_STEP = (OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE)


@dataclass(frozen=True)
class MergeLossGradient(Pass):
    """A fused loss and its backward become one operator."""

    name: ClassVar[str] = "merge-loss-gradient"
    stage: ClassVar[Stage] = Stage.STEP
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def apply(self, program: Program) -> Changes:
        """Merge every pair of which the gradient of the loss is known before the loss."""
        count = 0
        refusals: list[Refusal] = []
        for node in program.ops():
            if not ops.is_call(node, BACKWARD):
                continue
            loss = _loss_of(node)
            reason = _why_not(program, loss, node)
            if reason is None and loss is not None:
                _merge(program, loss, node)
                count += 1
            else:
                refusals.append(Refusal.at(node, str(reason)))
        if count:
            program.refresh()
        return Changes(count, tuple(refusals))


def _loss_of(backward: fx.Node) -> fx.Node | None:
    """The fused loss whose log-sum-exp ``backward`` reads."""
    node = named_arguments(backward)["lse"]
    while ops.stops_gradient(node):
        node = node.args[0]
    if not ops.is_getitem(node) or node.args[1] != LSE_RESULT:
        return None
    return node.args[0] if ops.is_call(node.args[0], LOSS) else None


def _why_not(program: Program, loss: fx.Node | None, backward: fx.Node) -> str | None:
    if not any(program.signature.outputs_of(*_WRITTEN_BY_A_STEP)):
        return "the backward may run later, with another gradient: this program updates nothing"
    if loss is None:
        return "the loss that this backward belongs to is not in the program"
    arguments = named_arguments(backward)
    others = [
        user
        for user in program.ops()
        if ops.is_call(user, BACKWARD) and user is not backward and _loss_of(user) is loss
    ]
    if others and not _is_deferred(arguments["needs"], [named_arguments(other)["needs"] for other in others]):
        return "the loss has more than one backward"
    if arguments["reduction"] == NONE:
        return "the loss has no reduction: each row has a gradient of its own"
    if arguments["grad_lse"] is not None:
        return "the log-sum-exp has a gradient of its own, which is known only behind it"
    weight, lse = program.spec(arguments["weight"]), program.spec(arguments["lse"])
    if weight.dtype != lse.dtype and arguments["needs"][1]:
        return f"the weight's gradient would be summed in a copy in {lse.dtype}"
    # What may have to move before the loss is scalars and masks of labels.
    if not hoist(program, arguments["grad_loss"], loss, max_bytes=program.spec(arguments["target"]).nbytes):
        return "the gradient of the loss is not known before the loss"
    return None


def _is_deferred(needs: list[bool], others: list[list[bool]]) -> bool:
    """Whether ``needs`` is all that is needed at once: others give the weight's gradient alone, where it is needed."""
    return needs[0] and all(other == [False, True, False] for other in others)


def _merge(program: Program, loss: fx.Node, backward: fx.Node) -> None:
    arguments, backward_arguments = named_arguments(loss), named_arguments(backward)
    merged = program.insert_before(
        loss, WITH_GRADIENT, backward_arguments["grad_loss"], *arguments.values(), backward_arguments["needs"]
    )
    for source, shift in ((loss, 0), (backward, NUM_LOSS_RESULTS)):
        for user in list(source.users):
            if ops.is_getitem(user):
                result = program.insert_before(loss, ops.getitem, merged, _position(user) + shift, origin_of=user)
                program.take_over(user, result)
    erase_dead(program, (loss, backward))


def _position(getitem: fx.Node) -> int:
    return int(getitem.args[1])  # type: ignore[arg-type]
