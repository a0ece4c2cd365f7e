"""The tensors that a joint Program quantizes to FP8, each with a name that other batch signatures give it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.fp8_codes import CODE_DTYPES, finds_scales, is_quantize
from graphopt.ir.fp8_products import OperandKind, OperandKinds
from graphopt.ir.fp8_watch import CALL_MARK, WEIGHT_HISTORY
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, OutputKind
from graphopt.operators.fp8 import MATMUL


class Role(StrEnum):
    """What a quantized tensor is to the product that reads it; KEPT: none does, it is kept for the backward part."""

    WEIGHT = "weight"
    INPUT = "input"
    GRADIENT = "gradient"
    KEPT = "kept"


@dataclass(frozen=True)
class QuantizedTensor:
    """A value that ``quantizers`` make codes of, in order; all of them see the same numbers, in one format."""

    name: str
    quantizers: tuple[fx.Node, ...]

    @property
    def format(self) -> str:
        """The name of the format."""
        return str(self.quantizers[0].args[1])


def quantized_tensors(program: Program) -> tuple[QuantizedTensor, ...]:
    """The tensors that ``program`` quantizes with scales of their present values, in order.

    A tensor is called after the module of the first product that reads it, and its role there ("gradient": of what that
    module returns); a parameter by its own name. Where a module runs several times, and where slices of one
    value are quantized apart, later tensors have ``#2``, ``#3``, ... behind the name.
    """
    groups: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for node in program.ops():
        if finds_scales(node):
            groups.setdefault((_behind_whole_views(node.args[0]), str(node.args[1])), []).append(node)  # type: ignore[arg-type]
    namer = _Namer(program)
    return tuple(namer.named(ops.behind_views(source), tuple(nodes)) for (source, _), nodes in groups.items())


def _behind_whole_views(node: fx.Node) -> fx.Node:
    """What ``node`` shows all elements of. Slices of one value are several tensors: each has a largest value of its
    own, and may alone hold Inf or NaN."""
    while ops.is_view(node) and not ops.is_call(node, torch.ops.aten.as_strided.default):
        source = node.all_input_nodes[0]
        if source.meta["val"].numel() != node.meta["val"].numel():
            break
        node = source
    return node


def depends_on_parameters_alone(program: Program) -> Set[fx.Node]:
    """The values that stay as they are while parameters do (for membership tests): made from parameters, constants and
    the history of weights. A weight times a buffer, or with noise, is none: the next micro-step may have another.
    """
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    fixed = {node for node, entry in inputs if entry.kind is InputKind.PARAM or entry.name == WEIGHT_HISTORY}
    fixed.update(program.constants())
    for node in program.ops():
        sources = node.all_input_nodes
        if sources and fixed.issuperset(sources) and ops.is_pure(node):
            fixed.add(node)
    return fixed


def _behind_copies(node: fx.Node) -> fx.Node:
    """What codes or copies are made from."""
    while _hands_codes_on(node) or ops.is_conversion(node):
        node = node.all_input_nodes[0]
    return node


def _hands_codes_on(node: fx.Node) -> bool:
    """Whether ``node`` makes codes, or gives codes or scales as they are, in another form or padded."""
    if node.op != "call_function":
        return False
    is_code = getattr(node.meta.get("val"), "dtype", None) in CODE_DTYPES
    return is_quantize(node) or ops.is_getitem(node) or ops.is_view(node) or is_code


class _Namer:
    """Gives each tensor a role and a name of its own."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.kinds = OperandKinds(program)
        self.trained = {
            value: output.name
            for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
            if output.kind is OutputKind.GRAD
        }
        self.order = {node: i for i, node in enumerate(program.graph.nodes)}
        self.times: dict[str, int] = {}

    def named(self, source: fx.Node, quantizers: tuple[fx.Node, ...]) -> QuantizedTensor:
        products = self._products(quantizers)
        role = self._role(source, products)
        name = self.kinds.parameters.get(source)
        if name is None:
            module = self._module(products or [source], role)
            name = f"{module}.{role}" if module else str(role)
        self.times[name] = times = self.times.get(name, 0) + 1
        return QuantizedTensor(name if times == 1 else f"{name}{CALL_MARK}{times}", quantizers)

    def _role(self, source: fx.Node, products: Sequence[fx.Node]) -> Role:
        match self.kinds.of(source):
            case OperandKind.GRADIENT:
                return Role.GRADIENT
            case OperandKind.WEIGHT:
                return Role.WEIGHT
        return Role.INPUT if products else Role.KEPT

    def _module(self, readers: Sequence[fx.Node], role: Role) -> str:
        """The path of the module that the first of ``readers`` belongs to.

        In the backward part origins are guesses, and parameters say it better.
        """
        if role is Role.GRADIENT:
            for name in filter(None, map(self._parameter, readers)):
                return name.rpartition(".")[0]
        return self.program.origin(readers[0]).module

    def _parameter(self, product: fx.Node) -> str | None:
        """The parameter that ``product`` reads, or whose gradient it is."""
        for operand in product.all_input_nodes:
            name = self.kinds.parameters.get(_behind_copies(operand))
            if name is not None:
                return name
        node = product
        while node not in self.trained and len(node.users) == 1:
            node = next(iter(node.users))
            if not (ops.is_view(node) or ops.is_conversion(node)):
                return None
        return self.trained.get(node)

    def _products(self, quantizers: Iterable[fx.Node]) -> list[fx.Node]:
        """The products that read codes of ``quantizers``, in order: as they are, viewed, padded or made again."""
        found: list[fx.Node] = []
        waiting = list(quantizers)
        while waiting:
            for user in waiting.pop().users:
                if ops.is_call(user, MATMUL):
                    found.append(user)
                elif _hands_codes_on(user):
                    waiting.append(user)
        return sorted(dict.fromkeys(found), key=self.order.__getitem__)
