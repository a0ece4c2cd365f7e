"""Cross-entropies over class indices in a forward graph, in the forms that a capture brings, as one description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.linear_loss import MEAN, NONE
from graphopt.ir.program import Program

aten = torch.ops.aten

_WITH_SOFTMAX = aten.cross_entropy_loss.default
_OF_LOG_PROBABILITIES = (aten.nll_loss_nd.default, aten.nll_loss.default)
_LOG_SOFTMAX = aten.log_softmax.int
_IGNORED_BY_DEFAULT = -100


@dataclass(frozen=True)
class LossCall:
    """``loss``: the call whose value is the loss; ``logits``: [...,V]; ``target``: i64[...].

    ``calls``: what lies between logits and loss. ``z_loss``: see the operators.
    """

    loss: fx.Node
    logits: fx.Node
    calls: tuple[fx.Node, ...]
    target: fx.Node
    class_weight: fx.Node | None
    reduction: int
    ignore_index: int
    label_smoothing: float
    z_loss: float = 0.0


def is_cross_entropy(node: fx.Node) -> bool:
    """Whether ``node`` ends a cross-entropy."""
    if ops.is_call(node, *_OF_LOG_PROBABILITIES):
        source = node.args[0]
        return isinstance(source, fx.Node) and ops.is_call(source, _LOG_SOFTMAX)
    return ops.is_call(node, _WITH_SOFTMAX)


def read_loss(program: Program, node: fx.Node) -> LossCall | str:
    """The LossCall of a cross-entropy, or the reason why it is none over class indices with the classes last."""
    source, target = node.args[:2]
    calls: tuple[fx.Node, ...] = (node,)
    if not ops.is_call(node, _WITH_SOFTMAX):
        softmax = source
        assert isinstance(softmax, fx.Node)
        calls, source = (softmax, node), softmax.args[0]
        ndim = len(program.spec(softmax).shape)
        if int(softmax.args[1]) % ndim != min(1, ndim - 1):  # type: ignore[arg-type]
            return "the softmax is not over the classes"
    assert isinstance(source, fx.Node) and isinstance(target, fx.Node)
    if program.spec(target).dtype != torch.int64 or program.spec(target).shape == program.spec(source).shape:
        return "labels are probabilities, not class indices"
    logits = source
    if len(program.spec(source).shape) != 2:
        if not _moves_classes(program, source):
            return "the classes are not the last dimension of what the linear layer gives"
        calls, logits = (source, *calls), source.args[0]  # type: ignore[assignment]
    return LossCall(
        loss=node,
        logits=logits,
        calls=calls,
        target=target,
        class_weight=ops.argument(node, 2, "weight"),
        reduction=int(ops.argument(node, 3, "reduction", MEAN)),
        ignore_index=int(ops.argument(node, 4, "ignore_index", _IGNORED_BY_DEFAULT)),
        label_smoothing=float(ops.argument(node, 5, "label_smoothing", 0.0)),
    )


def _moves_classes(program: Program, node: fx.Node) -> bool:
    """Whether ``node`` moves the last dimension to position 1, where torch wants the classes."""
    num_dims = len(program.spec(node).shape)
    if ops.is_call(node, aten.transpose.int):
        return num_dims == 3 and {int(dim) % 3 for dim in node.args[1:3]} == {1, 2}  # type: ignore[arg-type]
    if not ops.is_call(node, aten.permute.default):
        return False
    dims = [int(dim) % num_dims for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    return dims == [0, num_dims - 1, *range(1, num_dims - 1)]


def log_sum_exps(program: Program, node: fx.Node) -> tuple[fx.Node, ...]:
    """The users of ``node`` that are its log-sum-exp over the classes, which come last."""
    last = len(program.spec(node).shape) - 1
    return tuple(
        user
        for user in node.users
        if ops.is_call(user, aten.logsumexp.default)
        and [int(dim) % (last + 1) for dim in _as_list(user.args[1])] == [last]
    )


def with_z_loss(program: Program, call: LossCall, log_sum_exp: fx.Node) -> LossCall:
    """``call`` with the z-loss ``weight * mean(lse^2)`` that is added to it, or ``call`` if there is none.

    The mean must be over all rows and of the kind of the loss's own reduction, and nothing else may use the parts.
    """
    square = _only_user(log_sum_exp)
    if square is None or not _is_square(square, log_sum_exp) or call.reduction == NONE:
        return call
    reduced = _only_user(square)
    wanted = aten.mean.default if call.reduction == MEAN else aten.sum.default
    if reduced is None or not ops.is_call(reduced, wanted) or reduced.kwargs:
        return call
    scaled = _only_user(reduced)
    if scaled is None or ops.arithmetic(scaled) != "mul" or not isinstance(scaled.args[1], (int, float)):
        return call
    added = _only_user(scaled)
    if added is None or ops.arithmetic(added) != "add" or added.kwargs or _only_user(call.loss) is not added:
        return call
    if {*added.args} != {call.loss, scaled} or program.spec(added) != program.spec(call.loss):
        return call
    return replace(call, loss=added, z_loss=float(scaled.args[1]))


def _is_square(node: fx.Node, source: fx.Node) -> bool:
    if ops.is_call(node, aten.square.default):
        return True
    if ops.arithmetic(node) == "pow":
        return bool(node.args[1] == 2)
    return ops.arithmetic(node) == "mul" and tuple(node.args) == (source, source)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
