"""Make the gradient of a cross-entropy in the memory of its log-softmax: no gradient of it is ever stored.

Before::

    log_probs: 'f32[N,V]' = aten._log_softmax.default(logits, 1, False)
    sparse: 'f32[N,V]' = aten.nll_loss_backward.default(grad, log_probs, target, None, 1, -100, total)
    dense: 'f32[N,V]' = aten._log_softmax_backward_data.default(sparse, log_probs, 1, torch.float32)

After (``row`` is the one element a row that ``sparse`` would hold)::

    probs: 'f32[N,V]' = aten.exp.default(log_probs)
    scaled: 'f32[N,V]' = aten.mul.Tensor(probs, -row[:, None])
    dense: 'f32[N,V]' = aten.scatter_add.default(scaled, 1, target[:, None], row[:, None])

Saves ``2 * N * V * itemsize`` bytes at the moment that is often the fullest of a step: all three write into the memory
of ``log_probs``, which dies there (``reuse-last-use``). So a step that must return its logits holds them and one more
of their size, no second copy. Costs nothing: two passes over the memory instead of three.

Numerics. ``g - p * s`` becomes ``-p * s + g``; torch may compute the former in one rounding.

Refuses a log-softmax that anything else of the backward reads, one below ``min_logits_bytes``, and losses over more
than two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import backward_nodes
from graphopt.ir.program import Program, Stage
from graphopt.ir.units import format_bytes
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

aten = torch.ops.aten

_MEAN = 1


@dataclass(frozen=True)
class ScatterLossGradient(Pass):
    """The gradient of a cross-entropy is made in place of its log-softmax."""

    min_logits_bytes: int = 8 * 2**20

    name: ClassVar[str] = "scatter-loss-gradient"
    stage: ClassVar[Stage] = Stage.JOINT
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def apply(self, program: Program) -> Changes:
        refusals = []
        count = 0
        backward = backward_nodes(program)
        for node in program.ops():
            loss_gradient = _loss_gradient(node)
            if loss_gradient is None:
                continue
            objection = self._objection(program, node, loss_gradient, backward)
            if objection is None:
                program.take_over(node, _scattered(program, node, loss_gradient))
                program.erase_if_unused(loss_gradient)
                count += 1
            else:
                refusals.append(Refusal.at(node, objection))
        return Changes(count, tuple(refusals))

    def _objection(self, program: Program, node: fx.Node, loss_gradient: fx.Node, backward: set[fx.Node]) -> str | None:
        log_probs = node.args[1]
        assert isinstance(log_probs, fx.Node), "the second argument is the log-softmax"
        spec = program.spec(node)
        if spec.nbytes < self.min_logits_bytes:
            return f"{format_bytes(spec.nbytes)} are too few to matter"
        if program.spec(log_probs) != spec or len(spec.shape) != 2 or node.args[2] not in (1, -1):
            return "it is not over the last of two dimensions, or changes the dtype"
        if len(loss_gradient.users) > 1:
            return f"{loss_gradient.name} is also used by others"
        others = [user for user in log_probs.users if user in backward and user not in (node, loss_gradient)]
        if others:
            return f"{log_probs.name} is also read by {others[0].name}"
        return None


def _loss_gradient(node: fx.Node) -> fx.Node | None:
    """The gradient of a negative log-likelihood that ``node`` takes through the log-softmax it was computed from."""
    if not ops.is_call(node, aten._log_softmax_backward_data.default):
        return None
    gradient, log_probs = node.args[0], node.args[1]
    if not isinstance(gradient, fx.Node) or not ops.is_call(gradient, aten.nll_loss_backward.default):
        return None
    return gradient if gradient.args[1] is log_probs else None


def _scattered(program: Program, node: fx.Node, loss_gradient: fx.Node) -> fx.Node:
    grad, log_probs, target, weight, reduction, ignored, total = loss_gradient.args

    def emit(operator: Any, *args: Any) -> fx.Node:
        return program.insert_before(node, operator, *args, origin_of=node)

    counts = emit(aten.ne.Scalar, target, ignored)
    safe = emit(aten.where.ScalarOther, counts, target, 0)
    scale = emit(aten.neg.default, emit(aten.div.Tensor, grad, total) if reduction == _MEAN else grad)
    if weight is not None:
        scale = emit(aten.mul.Tensor, emit(aten.index_select.default, weight, 0, safe), scale)
    row = emit(aten.unsqueeze.default, emit(aten.where.ScalarOther, counts, scale, 0.0), 1)
    scaled = emit(aten.mul.Tensor, emit(aten.exp.default, log_probs), emit(aten.neg.default, row))
    return emit(aten.scatter_add.default, scaled, 1, emit(aten.unsqueeze.default, safe, 1), row)
