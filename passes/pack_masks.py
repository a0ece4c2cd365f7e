"""Keep the outcome of a coin toss as one bit an element where the backward part needs it again.

Before::

    mask: 'f32[B,T,D]' = aten.bernoulli.p(like, 0.9)
    scale: 'f32[B,T,D]' = aten.div.Scalar(mask, 0.9)        # read in forward and backward

After::

    mask: 'f32[B,T,D]' = aten.bernoulli.p(like, 0.9)
    packed: 'u8[B*T*D/8]' = graphopt.pack_bits.default(mask)
    unpacked: 'f32[B,T,D]' = graphopt.unpack_bits.default(packed, [B, T, D], torch.float32)
    scale: 'f32[B,T,D]' = aten.div.Scalar(unpacked, 0.9)    # can be computed again from packed

A random draw is never repeated, so its result had to be kept as it was. Saves ``(itemsize - 1/8) * numel`` bytes from
forward to backward where ``recompute`` then drops ``scale`` and keeps ``packed``. Costs two passes over the mask in the
forward part and one in the backward part. A toss is 0 or 1, which a bit holds exactly.

Refuses draws that the backward part does not need, that are returned, that have one byte an element already, or whose
layout would not come back. Runs only when a policy or a budget asks for less memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program, Stage, nodes_in
from graphopt.operators.pack_bits import PACK_BITS, UNPACK_BITS
from graphopt.pipeline.pass_base import Changes, Pass, Refusal


@dataclass(frozen=True)
class PackMasks(Pass):
    """Coin tosses are kept as bits, from which their users are computed again."""

    name: ClassVar[str] = "pack-masks"
    stage: ClassVar[Stage] = Stage.STEP

    def apply(self, program: Program) -> Changes:
        order = program.ops()
        early = set(order[: forward_end(program)])
        returned = set(nodes_in(program.output_values()))
        count = 0
        refusals = []
        for node in order:
            if node not in early or not ops.is_coin_toss(node) or _is_packed(node):
                continue
            objection = _objection(program, node, early, returned)
            if objection is None:
                _pack(program, node)
                count += 1
            else:
                refusals.append(Refusal.at(node, objection))
        if count:
            program.refresh()  # views of a mask show other memory now
        return Changes(count, tuple(refusals))


def _is_packed(node: fx.Node) -> bool:
    return len(node.users) == 1 and ops.is_call(next(iter(node.users)), PACK_BITS)


def _objection(program: Program, node: fx.Node, early: set[fx.Node], returned: set[fx.Node]) -> str | None:
    spec = program.spec(node)
    if spec.dtype.itemsize == 1:
        return "it has one byte an element already"
    if node in returned:
        return "it is an output"
    if not _is_needed_late(node, early):
        return "the backward part does not need it"
    if not program.value(node).is_contiguous():
        return "its memory is not laid out in order"
    return None


def _is_needed_late(node: fx.Node, early: set[fx.Node]) -> bool:
    """Whether a call of the backward part reads ``node``, or something that pointwise calls make of it alone."""
    for user in node.users:
        if user.op == "output":
            continue
        if user not in early:
            return True
        only_from_node = ops.is_view(user) or (ops.is_pointwise(user) and len(ops.tensor_arguments(user)) == 1)
        if only_from_node and _is_needed_late(user, early):
            return True
    return False


def _pack(program: Program, node: fx.Node) -> None:
    spec = program.spec(node)
    packed = program.insert_before(node.next, PACK_BITS, node, origin_of=node)
    unpacked = program.insert_before(packed.next, UNPACK_BITS, packed, list(spec.shape), spec.dtype, origin_of=node)
    for user in list(node.users):
        if user is not packed:
            user.replace_input_with(node, unpacked)
