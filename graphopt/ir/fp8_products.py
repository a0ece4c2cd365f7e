"""The matrix products of a joint program: which of a layer's three each is, what it reads, and how large it is.

A layer ``y = x W`` makes three: forward ``x[T,K] @ W[K,N]``, input gradient ``dy[T,N] @ W^T``, weight gradient
``x^T @ dy``. Each is told by its operands: weights depend on parameters and constants alone, gradients on a tangent,
activations on the rest. A gradient belongs to the forward product that reads the same weight, or the same activation;
one that none belongs to is of a product of two activations, or of two weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import backward_nodes, reached_from
from graphopt.ir.precision_ops import Role, role
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, OutputKind

aten = torch.ops.aten

_KEEPS_GRADIENT = (Role.MOVES, Role.ADDS, Role.CONVERTS)
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
    ``node``); None for one of no layer, unless it is a gradient of a product of two weights. ``module``: the path that
    it comes from, which is that of ``forward`` where there is one.
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
    layers = _Layers(program, products)
    return tuple(layers.placed(product) for product in products)


class OperandKinds:
    """What each value of a program is to a product."""

    def __init__(self, program: Program) -> None:
        self.gradients = backward_nodes(program)
        varying = (InputKind.BATCH, InputKind.TANGENT, InputKind.SEED)
        inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
        self.varying = reached_from(program, [node for node, entry in inputs if entry.kind in varying])
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


class _Layers:
    """Which forward product each product of a program belongs to.

    Where a weight or an activation has several, the origins of backward nodes do not tell them apart: they are guessed
    from the order of the autograd graph, and lost where it has nodes that the forward part does not show. The graph
    does: a weight gradient leads to the gradient of its parameter, and shares what it reads with the input gradient.
    """

    def __init__(self, program: Program, products: Sequence[Product]) -> None:
        self._trained = {
            value: output.name
            for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
            if output.kind is OutputKind.GRAD and isinstance(value, fx.Node)
        }
        self._forward = [product for product in products if product.role is ProductRole.FORWARD]
        self._of_two_weights = [
            product for product in products if {o.kind for o in product.operands} == {OperandKind.WEIGHT}
        ]
        self._by_gradient: dict[fx.Node, set[fx.Node]] = {}
        for product in products:
            found = self._of_weight_gradient(product) if product.role is ProductRole.WEIGHT_GRADIENT else None
            if found is not None:
                self._by_gradient.setdefault(_gradient_of(product), set()).add(found.node)

    def placed(self, product: Product) -> Product:
        """``product`` with the forward product of its layer; a gradient without one is of no layer."""
        match product.role:
            case ProductRole.FORWARD:
                return replace(product, forward=product.node)
            case ProductRole.INPUT_GRADIENT:
                found = self._of_input_gradient(product)
            case ProductRole.WEIGHT_GRADIENT:
                found = self._of_weight_gradient(product)
            case _:
                return product
        if found is not None:
            return replace(product, forward=found.node, module=found.module)
        other = self._two_weights(product)
        if other is not None:
            return replace(product, role=ProductRole.OTHER, forward=other.node, module=other.module)
        return replace(product, role=ProductRole.OTHER)

    def _of_input_gradient(self, product: Product) -> Product | None:
        weight = product.only(OperandKind.WEIGHT)
        found = [other for other in self._forward if other.only(OperandKind.WEIGHT) is weight]
        same = self._by_gradient.get(_gradient_of(product), set())
        return max(found, key=lambda o: (o.node in same, o.module == product.module), default=None)

    def _of_weight_gradient(self, product: Product) -> Product | None:
        name = self._parameter(product.node)
        rows = [other for other in self._forward if other.rows == product.contraction]
        found = [other for other in rows if _is_weight_gradient_of(product, other)]
        # What it reads may have been computed again, or have gone through a copy: its parameter still tells.
        found = found or [other for other in rows if name and name in other.weights and _has_shape_of(product, other)]
        return max(found, key=lambda o: (bool(name) and name in o.weights, o.module == product.module), default=None)

    def _two_weights(self, product: Product) -> Product | None:
        sources = {operand.source for operand in product.operands if operand.kind is OperandKind.WEIGHT}
        found = (o for o in self._of_two_weights if not sources.isdisjoint(operand.source for operand in o.operands))
        return next(found, None)

    def _parameter(self, node: fx.Node) -> str:
        """The one parameter whose gradient is ``node``, arranged, converted or added to others; empty for none."""
        names: set[str] = set()
        waiting, seen = [node], {node}
        while waiting:
            value = waiting.pop()
            if value in self._trained:
                names.add(self._trained[value])
            users = [user for user in value.users if user.op != "output" and user not in seen]
            if len(names) > 1 or any(role(user) not in _KEEPS_GRADIENT for user in users):
                return ""
            seen.update(users)
            waiting += users
        return names.pop() if names else ""


def _gradient_of(product: Product) -> fx.Node:
    """The gradient that a gradient product reads, whatever its shape there."""
    return _whole(product.only(OperandKind.GRADIENT))


def _is_weight_gradient_of(product: Product, forward: Product) -> bool:
    """Whether ``product`` contracts the rows of what ``forward`` reads, and has the shape of its weight."""
    read, own = product.only(OperandKind.ACTIVATION), forward.only(OperandKind.ACTIVATION)
    return _has_shape_of(product, forward) and product.contraction == forward.rows and _whole(read) is _whole(own)


def _has_shape_of(product: Product, forward: Product) -> bool:
    """Whether ``product`` has the shape of the weight of ``forward``, or of its transpose."""
    return {product.rows, product.columns} == {forward.columns, forward.contraction}


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
