"""The matrix products of a joint program: which of a layer's three each is, what it reads, and how large it is.

A layer ``y = x W`` makes three: forward ``x[T,K] @ W[K,N]``, input gradient ``dy[T,N] @ W^T``, weight gradient
``x^T @ dy``. Each is told by its operands: weights depend on parameters and constants alone, gradients on a tangent,
activations on the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import backward_nodes
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind

aten = torch.ops.aten

_TRANSPOSITIONS = (aten.t.default, aten.transpose.int, aten.permute.default)


class OperandKind(StrEnum):
    """WEIGHT: from parameters and constants alone. GRADIENT: from a tangent. ACTIVATION: all else."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class ProductRole(StrEnum):
    """Which of a layer's products; OTHER: of no layer, such as one of two activations."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    OTHER = "other"


@dataclass(frozen=True)
class Operand:
    """What a product reads. ``base``: the 2-D value behind transpositions; ``is_transposed``: whether there is one.

    ``source``: for a weight the value behind its conversions, whose numbers are exact; else ``base``.
    """

    base: fx.Node
    source: fx.Node
    is_transposed: bool
    kind: OperandKind
    weight: str = ""


@dataclass(frozen=True)
class Product:
    """``node`` computes ``a[M,K] @ b[K,N] (+ bias[N])``."""

    node: fx.Node
    role: ProductRole
    a: Operand
    b: Operand
    bias: fx.Node | None
    rows: int
    columns: int
    contraction: int

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Both operands."""
        return self.a, self.b

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters among its operands."""
        return tuple(operand.weight for operand in self.operands if operand.weight)


def find_products(program: Program) -> tuple[Product, ...]:
    """The products of two matrices in ``program``, in order; batched ones and those with factors are left out."""
    kinds = _Kinds(program)
    found = (_product(program, node, kinds) for node in program.ops())
    return tuple(product for product in found if product is not None)


class _Kinds:
    """What each value is to a product."""

    def __init__(self, program: Program) -> None:
        self.gradients = backward_nodes(program)
        varying = (InputKind.BATCH, InputKind.TANGENT, InputKind.SEED)
        inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
        self.varying = _reached(program, [node for node, entry in inputs if entry.kind in varying])
        self.parameters = {
            node: entry.name
            for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True)
            if entry.kind is InputKind.PARAM
        }

    def of(self, node: fx.Node) -> OperandKind:
        if node in self.gradients:
            return OperandKind.GRADIENT
        return OperandKind.ACTIVATION if node in self.varying else OperandKind.WEIGHT

    def operand(self, node: fx.Node) -> Operand:
        base, is_transposed = node, False
        while is_transposition(base):
            base, is_transposed = base.all_input_nodes[0], not is_transposed
        kind = self.of(base)
        source = base
        while kind is OperandKind.WEIGHT and ops.is_conversion(source):
            source = source.all_input_nodes[0]
        return Operand(base, source, is_transposed, kind, self.parameters.get(source, ""))


def _reached(program: Program, sources: Iterable[fx.Node]) -> Set[fx.Node]:
    found = set(sources)
    for node in program.ops():
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def is_transposition(node: fx.Node) -> bool:
    """Whether ``node`` is the transpose of a matrix."""
    if not ops.is_call(node, *_TRANSPOSITIONS):
        return False
    source: Any = node.all_input_nodes[0]
    return node.meta["val"].dim() == 2 and tuple(node.meta["val"].shape) == tuple(source.meta["val"].shape[::-1])


def _product(program: Program, node: fx.Node, kinds: _Kinds) -> Product | None:
    parts = _parts(node)
    if parts is None:
        return None
    left, right, bias = parts
    a, b = kinds.operand(left), kinds.operand(right)
    rows, contraction = program.spec(left).shape
    columns = program.spec(right).shape[1]
    return Product(node, _role(node, a, b, kinds), a, b, bias, rows, columns, contraction)


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Left, right and bias of a product that this module understands."""
    args: Any = node.args
    if ops.is_call(node, aten.mm.default) and not node.kwargs:
        return args[0], args[1], None
    if ops.is_call(node, aten.addmm.default) and len(args) == 3 and not node.kwargs:
        return (args[1], args[2], args[0]) if args[0].meta["val"].dim() == 1 else None
    return None


def _role(node: fx.Node, a: Operand, b: Operand, kinds: _Kinds) -> ProductRole:
    pair = {a.kind, b.kind}
    if pair == {OperandKind.ACTIVATION, OperandKind.WEIGHT}:
        return ProductRole.FORWARD
    if pair == {OperandKind.GRADIENT, OperandKind.WEIGHT}:
        return ProductRole.INPUT_GRADIENT
    if pair == {OperandKind.GRADIENT, OperandKind.ACTIVATION}:
        return ProductRole.WEIGHT_GRADIENT
    return ProductRole.OTHER
