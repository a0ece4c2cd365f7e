"""Products that FP8 does not take, whatever their sizes: each with the reason, so that no product goes unmentioned.

Attention and all other products of two activations stay in two bytes: their operands differ with every token, so that
none is quantized once for several products, and their error goes through an exponential. Batched weights, experts,
convolutions and recurrent layers could be taken and are not yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.fp8_products import OperandKind, OperandKinds, ProductRole
from graphopt.ir.linear_loss import BACKWARD, LOSS, named_arguments
from graphopt.ir.precision_ops import qualified_name
from graphopt.ir.program import Program
from graphopt.ir.storage import tensors_in

ACTIVATIONS = "product of two activations, as in attention: never"
ATTENTION = "attention product: never, its error goes through an exponential"
BATCHED = "batched product with weights: not supported yet"
EXPERTS = "products of experts, by groups: not supported yet"
CONVOLUTION = "convolution: not supported yet"
RECURRENT = "recurrent layer as one operator: not supported yet"
FUSED_LOSS = "head inside the fused loss: never, its logits and sums are float32"
UNCOMMON = "product in a form that is not supported: an operand is no matrix, or there are factors"


@dataclass(frozen=True)
class OtherProduct:
    """``batch`` products ``[rows, contraction] @ [contraction, columns]`` inside ``node``; sizes are 0 where there is
    no one size.
    """

    node: fx.Node
    role: ProductRole
    reason: str
    rows: int = 0
    columns: int = 0
    contraction: int = 0
    batch: int = 1


def find_other_products(program: Program, taken: frozenset[fx.Node]) -> tuple[OtherProduct, ...]:
    """What multiplies matrices in ``program`` beside the products in ``taken``, in order."""
    kinds = OperandKinds(program)
    shapes = {
        program.spec(operand).shape
        for node in program.ops()
        if qualified_name(node) in _BATCHED
        for operand in _matrices(node)
        if kinds.of(operand) is OperandKind.WEIGHT
    }
    found: list[OtherProduct] = []
    for node in program.ops():
        if node in taken:
            continue
        name = qualified_name(node)
        if name in _BATCHED:
            found.append(_batched(program, node, kinds.of, shapes))
        elif ops.is_call(node, LOSS, BACKWARD):
            found += _fused_loss(program, node)
        elif name in _READERS:
            reason, sizes = _READERS[name]
            found.append(OtherProduct(node, ProductRole.OTHER, reason, *sizes(node)))
        elif ops.is_attention(node) or "scaled_dot_product" in name:
            found.append(OtherProduct(node, ProductRole.OTHER, ATTENTION, *_attention_sizes(node)))
        elif ops.is_matmul(node) or name in _UNCOMMON:
            found.append(OtherProduct(node, ProductRole.OTHER, UNCOMMON))
    return tuple(found)


def _matrices(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two operands of a batched product."""
    args: Any = node.args
    return (args[1], args[2]) if qualified_name(node) == "aten::baddbmm" else (args[0], args[1])


def _batched(
    program: Program, node: fx.Node, kind_of: Callable[[fx.Node], OperandKind], weights: set[tuple[int, ...]]
) -> OtherProduct:
    left, right = _matrices(node)
    batch, rows, contraction = program.spec(left).shape
    columns = program.spec(right).shape[2]
    has_weight = OperandKind.WEIGHT in (kind_of(left), kind_of(right))
    is_gradient = kind_of(left) is OperandKind.GRADIENT or kind_of(right) is OperandKind.GRADIENT
    of_weight = is_gradient and not weights.isdisjoint({(batch, rows, columns), (batch, columns, rows)})
    reason = BATCHED if has_weight or of_weight else ACTIVATIONS
    return OtherProduct(node, ProductRole.OTHER, reason, rows, columns, contraction, batch)


def _fused_loss(program: Program, node: fx.Node) -> list[OtherProduct]:
    arguments = named_arguments(node)
    (rows, features), classes = program.spec(arguments["hidden"]).shape, program.spec(arguments["weight"]).shape[0]
    if ops.is_call(node, LOSS):
        return [OtherProduct(node, ProductRole.FORWARD, FUSED_LOSS, rows, classes, features)]
    of_hidden, of_weight, _ = arguments["needs"]
    found = []
    if of_hidden:
        found.append(OtherProduct(node, ProductRole.INPUT_GRADIENT, FUSED_LOSS, rows, features, classes))
    if of_weight:
        found.append(OtherProduct(node, ProductRole.WEIGHT_GRADIENT, FUSED_LOSS, classes, features, rows))
    return found


_Sizes = tuple[int, int, int, int]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for argument in node.all_input_nodes for tensor in tensors_in(argument.meta.get("val"))]


def _attention_sizes(node: fx.Node) -> _Sizes:
    """Of the first product, queries by keys; a backward operator has the gradient before them."""
    skipped = int("backward" in qualified_name(node))
    query, key = _shape(node, skipped), _shape(node, skipped + 1)
    return query[-2], key[-2], query[-1], math.prod(query[:-2])


def _shape(node: fx.Node, position: int) -> tuple[int, ...]:
    argument: Any = node.args[position]
    return tuple(argument.meta["val"].shape)


def _convolution_sizes(node: fx.Node) -> _Sizes:
    """Of the forward product: positions, channels, and what each position reads."""
    is_backward = "backward" in qualified_name(node)
    read, weight = (_shape(node, 1), _shape(node, 2)) if is_backward else (_shape(node, 0), _shape(node, 1))
    written = _shape(node, 0) if is_backward else tuple(next(tensors_in(node.meta["val"])).shape)
    groups = read[1] // weight[1] if weight[1] and read[1] % weight[1] == 0 else 1
    return written[0] * math.prod(written[2:]), weight[0] // groups, math.prod(weight[1:]), groups


def _recurrent_sizes(node: fx.Node) -> _Sizes:
    """Of the product with the inputs; the first two tensors are inputs and their weight."""
    read, weight = (tuple(tensor.shape) for tensor in _tensors(node)[:2])
    return math.prod(read[:-1]), weight[0], read[-1], 1


def _expert_sizes(node: fx.Node) -> _Sizes:
    """All tokens together: how many an expert gets is known only when it runs."""
    rows = next(tensor.shape[0] for tensor in _tensors(node) if tensor.dim() == 2)
    weight = next((tuple(tensor.shape) for tensor in _tensors(node) if tensor.dim() == 3), (1, 0, 0))
    return int(rows), weight[2], weight[1], 1


_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})

_READERS: dict[str, tuple[str, Callable[[fx.Node], _Sizes]]] = {
    "aten::convolution": (CONVOLUTION, _convolution_sizes),
    "aten::convolution_backward": (CONVOLUTION, _convolution_sizes),
    "aten::mkldnn_rnn_layer": (RECURRENT, _recurrent_sizes),
    "aten::mkldnn_rnn_layer_backward": (RECURRENT, _recurrent_sizes),
    "graphopt::lstm_layer": (RECURRENT, _recurrent_sizes),
    "aten::_grouped_mm": (EXPERTS, _expert_sizes),
    "transformers::grouped_mm_fallback": (EXPERTS, _expert_sizes),
    "transformers::grouped_mm_fallback_backward": (EXPERTS, _expert_sizes),
}

_UNCOMMON = frozenset(
    f"aten::{name}" for name in ("mv", "addmv", "dot", "vdot", "addbmm", "addr", "_trilinear", "einsum")
)
