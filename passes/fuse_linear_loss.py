"""Fuse the last linear layer with its cross-entropy, so that the logits never exist as a whole.

Before::

    logits: 'f32[B,T,V]' = aten.linear.default(hidden, head)
    rows: 'f32[B*T,V]' = aten.view.default(logits, [-1, V])
    loss: 'f32[]' = aten.cross_entropy_loss.default(rows, labels)

After::

    rows: 'f32[B*T,D]' = aten.reshape.default(hidden, [B*T, D])
    fused = graphopt.linear_cross_entropy.default(rows, head, None, labels, None, -100, 0.0, ..., chunk)
    loss: 'f32[]' = fused[0]

Seen through: views, shifts (``logits[:, :-1]``), conversions to a wider dtype, a bias added behind the product, scales
and soft-capping ``c * tanh(x / c)``, ``transpose(1, 2)`` before the loss, ``log_softmax`` with ``nll_loss``; and a
z-loss: ``logsumexp`` of the same logits becomes a result of the operator, and ``w * mean(lse^2)`` added to the mean a
part of it.

Saves ``3 * N * V * itemsize`` bytes at the peak (logits, their log-softmax, its gradient) for ``chunk * V * 4``.
Costs the product once more, ``2 * N * V * D`` FLOPs, where the gradient is computed apart from the loss;
merge-loss-gradient takes that away again where it can.

Numerics. Logits, sums and the weight's gradient are in float32 (float64 for float64) also for bfloat16 and float16
layers, where the unfused form rounds logits and their gradient to the layer's dtype. Sums run in another order.

Refuses logits that are a required output or that something else reads; labels that are probabilities; logits that do
not come from one matrix product; and logits of less than ``min_logits_bytes``, where a chunk would be nearly all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.erase import erase_dead
from graphopt.ir.hoist import hoist
from graphopt.ir.linear_loss import LOSS, LOSS_RESULT, LSE_RESULT, default_chunk, logits_bytes
from graphopt.ir.logits import LogitChain, read_logits
from graphopt.ir.loss_call import LossCall, is_cross_entropy, log_sum_exps, read_loss, with_z_loss
from graphopt.ir.program import Program, Stage
from graphopt.ir.units import format_bytes
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal

aten = torch.ops.aten

_WORTH_FUSING = 8 * 2**20
"""Bytes of logits in float32. Below, a step of any model spends its memory elsewhere."""


@dataclass(frozen=True)
class _Fusion:
    """A cross-entropy, how its logits are made, and the log-sum-exps of them that the model takes as well."""

    call: LossCall
    chain: LogitChain
    log_sum_exps: tuple[fx.Node, ...]


@dataclass(frozen=True)
class FuseLinearLoss(Pass):
    """See the module's docstring. ``chunk``: rows of logits at a time (0: chosen by size)."""

    name: ClassVar[str] = "fuse-linear-loss"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    min_logits_bytes: int = _WORTH_FUSING
    chunk: int = 0

    def apply(self, program: Program) -> Changes:
        """Fuse every cross-entropy whose logits nothing else needs."""
        count = 0
        refusals: list[Refusal] = []
        for node in program.ops():
            if not is_cross_entropy(node):
                continue
            reason = self._fuse(program, node)
            count += reason is None
            refusals += [] if reason is None else [Refusal.at(node, reason)]
        if count:
            program.refresh()
        return Changes(count, tuple(refusals))

    def _fuse(self, program: Program, node: fx.Node) -> str | None:
        """None if the cross-entropy at ``node`` was fused, else the reason why not."""
        fusion = _read(program, node)
        if isinstance(fusion, str):
            return fusion
        num_bytes = _num_logits_bytes(program, fusion.call)
        if num_bytes < max(1, self.min_logits_bytes):
            return f"the logits take {format_bytes(num_bytes)}, too little to compute them piece by piece"
        return _replace(program, fusion, self.chunk)


def _num_logits_bytes(program: Program, call: LossCall) -> int:
    *rows, num_classes = program.spec(call.logits).shape
    return logits_bytes(torch.Size(rows).numel(), num_classes)


def _read(program: Program, node: fx.Node) -> _Fusion | str:
    call = read_loss(program, node)
    if isinstance(call, str):
        return call
    chain = read_logits(program, call.logits)
    if isinstance(chain, str):
        return chain
    same = _with_same_rows(chain)
    copies = tuple(user for made in same for user in made.users if _is_copy(program, user) and user not in chain.nodes)
    found = tuple(lse for made in (*same, *copies) for lse in log_sum_exps(program, made))
    reason = _other_use(program, call, (*chain.nodes, *copies), found)
    if reason:
        return reason
    if len(found) == 1:
        call = with_z_loss(program, call, found[0])
    return _Fusion(call, chain, () if call.z_loss else found)


def _with_same_rows(chain: LogitChain) -> tuple[fx.Node, ...]:
    """The last calls of the chain that hold the final logits, if perhaps in another shape or dtype."""
    found = [chain.nodes[-1]]
    for node, before in zip(reversed(chain.nodes), reversed(chain.nodes[:-1]), strict=False):
        if not ops.keeps_order(node) and not ops.is_conversion(node):
            break
        found.append(before)
    return tuple(found)


def _is_copy(program: Program, node: fx.Node) -> bool:
    """Whether ``node`` shows the logits in another shape or dtype, and is there for log-sum-exps alone."""
    if not ops.keeps_order(node) and not ops.is_conversion(node):
        return False
    if program.spec(node).shape[-1:] != program.spec(node.all_input_nodes[0]).shape[-1:]:
        return False
    return bool(node.users) and len(log_sum_exps(program, node)) == len(node.users)


def _other_use(program: Program, call: LossCall, logits: tuple[fx.Node, ...], allowed: tuple[fx.Node, ...]) -> str:
    """Who else needs the logits, or the empty string."""
    inner = (*logits, *call.calls[:-1])
    own = {*inner, *call.calls, *allowed}
    for node in inner:
        for user in node.users:
            if user.op == "output":
                return "logits are a required output"
            if user not in own:
                where = program.origin(user)
                return f"logits also used by {user.name}" + (f" ({where})" if str(where) else "")
    return ""


def _replace(program: Program, fusion: _Fusion, chunk: int) -> str | None:
    call = fusion.call
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    anchor = min((call.loss, *fusion.log_sum_exps), key=order.__getitem__)
    target_bytes = program.spec(call.target).nbytes
    for value in (call.target, call.class_weight):
        if value is not None and not hoist(program, value, anchor, max_bytes=2 * target_bytes):
            return f"{value.name} is made behind the logits' first use and cannot be moved before it"
    fused = _insert(program, fusion, anchor, chunk)
    loss = program.insert_before(anchor, ops.getitem, fused, LOSS_RESULT, origin_of=call.loss)
    if program.spec(loss).shape != program.spec(call.loss).shape:
        shape = list(program.spec(call.loss).shape)
        loss = program.insert_before(anchor, aten.reshape.default, loss, shape, origin_of=call.loss)
    for log_sum_exp in fusion.log_sum_exps:
        program.replace(log_sum_exp, _log_sum_exp(program, fused, log_sum_exp))
    arguments = call.loss.all_input_nodes
    program.take_over(call.loss, loss)
    erase_dead(program, arguments)
    return None


def _insert(program: Program, fusion: _Fusion, anchor: fx.Node, chunk: int) -> fx.Node:
    call, chain = fusion.call, fusion.chain
    hidden = _rows_of_hidden(program, chain, anchor)
    target = call.target
    if len(program.spec(target).shape) != 1:
        target = program.insert_before(anchor, aten.reshape.default, target, [-1], origin_of=call.loss)
    weight = _weight_by_classes(program, chain, anchor)
    num_rows, num_features = program.spec(hidden).shape
    num_classes = program.spec(weight).shape[0]
    return program.insert_before(
        anchor,
        LOSS,
        hidden,
        weight,
        chain.bias,
        target,
        call.class_weight,
        call.ignore_index,
        call.label_smoothing,
        call.z_loss,
        chain.softcap,
        chain.logit_scale,
        call.reduction,
        program.spec(call.loss).dtype,
        min(chunk, num_rows) or default_chunk(num_rows, num_classes, num_features),
        origin_of=call.loss,
    )


def _rows_of_hidden(program: Program, chain: LogitChain, anchor: fx.Node) -> fx.Node:
    """[N,D]: the steps that choose or arrange rows of logits, taken on the layer's input instead."""
    node = chain.hidden
    num_features = program.spec(node).shape[-1]
    for step in chain.row_steps:
        shape = (*program.spec(step).shape[:-1], num_features)
        if not ops.keeps_order(step):
            node = program.insert_before(anchor, aten.slice.Tensor, node, *step.args[1:], origin_of=step)
        elif program.spec(node).shape != shape:
            node = program.insert_before(anchor, aten.reshape.default, node, list(shape), origin_of=step)
    if len(program.spec(node).shape) != 2:
        node = program.insert_before(anchor, aten.reshape.default, node, [-1, num_features], origin_of=chain.product)
    return node


def _weight_by_classes(program: Program, chain: LogitChain, anchor: fx.Node) -> fx.Node:
    """[V,D]: the weight, or its transpose where the model multiplies with [D,V]."""
    weight = chain.weight
    if not chain.is_transposed:
        return weight
    if ops.is_call(weight, aten.t.default):
        return weight.args[0]  # type: ignore[return-value]
    return program.insert_before(anchor, aten.t.default, weight, origin_of=chain.product)


def _log_sum_exp(program: Program, fused: fx.Node, wanted: fx.Node) -> fx.Node:
    """What ``fused`` gives in the place of ``wanted``, in its shape and dtype."""
    spec = program.spec(wanted)
    node = program.insert_before(wanted, ops.getitem, fused, LSE_RESULT)
    if program.spec(node).dtype != spec.dtype:
        node = program.insert_before(wanted, aten._to_copy.default, node, dtype=spec.dtype)
    if program.spec(node).shape != spec.shape:
        node = program.insert_before(wanted, aten.reshape.default, node, list(spec.shape))
    return node
