"""The matrix products of a joint program: which of a layer's three each is, what it reads, and how large it is.

A layer ``y = x W`` makes three: forward ``x[T,K] @ W[K,N]``, input gradient ``dy[T,N] @ W^T``, weight gradient
``x^T @ dy``. Each is told by its operands: weights depend on parameters and constants alone, gradients on a tangent,
activations on the rest. A gradient that no forward product with a weight belongs to is of two activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
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
    """``node`` computes ``a[M,K] @ b[K,N] (+ bias[N])``. ``forward``: the forward product of its layer (which may be
    ``node``); None for one of no layer. ``module``: the path that it comes from.
    """

    node: fx.Node
    role: ProductRole
    a: Operand
    b: Operand
    bias: fx.Node | None
    rows: int
    columns: int
    contraction: int
    forward: fx.Node | None = None
    module: str = ""

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Both operands."""
        return self.a, self.b

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters among its operands."""
        return tuple(operand.weight for operand in self.operands if operand.weight)

    def only(self, kind: OperandKind) -> fx.Node:
        """The value behind the operand of ``kind``, of which there is one in a product of a layer."""
        (found,) = (operand.source for operand in self.operands if operand.kind is kind)
        return found


def find_products(program: Program) -> tuple[Product, ...]:
    """The products of two matrices in ``program``, in order; batched ones and those with factors are left out."""
    kinds = OperandKinds(program)
    found = (_product(program, node, kinds) for node in program.ops())
    products = tuple(product for product in found if product is not None)
    forward = [product for product in products if product.role is ProductRole.FORWARD]
    return tuple(_in_layer(product, forward) for product in products)


class OperandKinds:
    """What each value of a program is to a product."""

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
        """The kind of ``node``."""
        if node in self.gradients:
            return OperandKind.GRADIENT
        return OperandKind.ACTIVATION if node in self.varying else OperandKind.WEIGHT

    def operand(self, node: fx.Node) -> Operand:
        """``node`` as a product reads it."""
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


def _product(program: Program, node: fx.Node, kinds: OperandKinds) -> Product | None:
    parts = _parts(node)
    if parts is None:
        return None
    left, right, bias = parts
    a, b = kinds.operand(left), kinds.operand(right)
    rows, contraction = program.spec(left).shape
    columns = program.spec(right).shape[1]
    module = program.origin(node).module
    return Product(node, _role(a, b), a, b, bias, rows, columns, contraction, module=module)


def _in_layer(product: Product, forward: list[Product]) -> Product:
    """``product`` with the forward product of its layer; a weight gradient without one is of no layer."""
    match product.role:
        case ProductRole.FORWARD:
            return replace(product, forward=product.node)
        case ProductRole.INPUT_GRADIENT:
            found = [other for other in forward if other.only(OperandKind.WEIGHT) is product.only(OperandKind.WEIGHT)]
        case ProductRole.WEIGHT_GRADIENT:
            found = [other for other in forward if _is_weight_gradient_of(product, other)]
        case _:
            return product
    if not found:
        is_open = product.role is ProductRole.WEIGHT_GRADIENT
        return replace(product, role=ProductRole.OTHER) if is_open else product
    # A weight, or an input, may have several layers; then the gradient comes from the same module as its own.
    return replace(product, forward=max(found, key=lambda other: other.module == product.module).node)


def _is_weight_gradient_of(product: Product, forward: Product) -> bool:
    """Whether ``product`` contracts the rows of what ``forward`` reads, and has the shape of its weight."""
    read, own = product.only(OperandKind.ACTIVATION), forward.only(OperandKind.ACTIVATION)
    shape = {product.rows, product.columns} == {forward.columns, forward.contraction}
    return shape and product.contraction == forward.rows and _whole(read) is _whole(own)


def _whole(node: fx.Node) -> fx.Node:
    """The value that ``node`` shows in another shape."""
    while ops.keeps_order(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Left, right and bias of a product that this module understands."""
    args: Any = node.args
    if ops.is_call(node, aten.mm.default) and not node.kwargs:
        return args[0], args[1], None
    if ops.is_call(node, aten.addmm.default) and len(args) == 3 and not node.kwargs:
        return (args[1], args[2], args[0]) if args[0].meta["val"].dim() == 1 else None
    return None


def _role(a: Operand, b: Operand) -> ProductRole:
    pair = {a.kind, b.kind}
    if pair == {OperandKind.ACTIVATION, OperandKind.WEIGHT}:
        return ProductRole.FORWARD
    if pair == {OperandKind.GRADIENT, OperandKind.WEIGHT}:
        return ProductRole.INPUT_GRADIENT
    if pair == {OperandKind.GRADIENT, OperandKind.ACTIVATION}:
        return ProductRole.WEIGHT_GRADIENT
    return ProductRole.OTHER
