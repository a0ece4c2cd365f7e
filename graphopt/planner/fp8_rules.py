"""What decides about FP8 before costs do: devices, names, dtypes, places in the model, sizes; each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.errors import UnsupportedError
from graphopt.fp8 import ProductFacts, Recipe
from graphopt.ir.fp8_places import Places, edge_layer_of, edge_layers
from graphopt.ir.fp8_products import OperandKind, Product, ProductRole
from graphopt.ir.fp8_trained import Decision
from graphopt.ir.module_paths import matching_pattern
from graphopt.ir.precision_ops import Role as PrecisionRole
from graphopt.ir.program import Program
from graphopt.ir.spec import dtype_name

MULTIPLE = 16
"""Of columns and contraction: cuBLAS and ``torch._scaled_mm`` take no other ("trailing dimension of mat1", "both
dimensions of mat2"), and tiles are loaded by descriptors of 16 bytes. Rows are free."""

MOST_EMULATED_WORK = 0.25
"""More work by zeros at most where costs are not counted: a 97th column is worth 15 more, a second is not worth 14."""

_TWO_BYTES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Verdict:
    """``is_fp8``: decided, or None where costs decide (or, without costs, nothing is against it); ``reason``: why."""

    is_fp8: bool | None
    reason: str = ""


class Rules:
    """The rules of ``recipe`` for the products of ``program``."""

    def __init__(self, program: Program, recipe: Recipe, products: Sequence[Product]) -> None:
        self._program = program
        self._recipe = recipe
        self._forward: Mapping[fx.Node, Product] = {product.node: product for product in products}
        self._places = Places(program)
        self._edges = edge_layers(
            (product.module for product in products), first=recipe.skip_first, last=recipe.skip_last
        )

    def weights(self, product: Product) -> tuple[str, ...]:
        """The parameters that ``product`` reads, or whose gradient it is."""
        is_gradient = product.role is ProductRole.WEIGHT_GRADIENT and product.forward is not None
        return self._forward[product.forward].weights if is_gradient else product.weights  # type: ignore[index]

    def verdict(self, product: Product, trained: Decision | None = None) -> Verdict:
        """What is decided about ``product`` before its sizes and costs are looked at. ``trained``: by training, in the
        place of all that may come out differently in evaluation.
        """
        excluded = matching_pattern(product.module, self._recipe.exclude)
        included = matching_pattern(product.module, self._recipe.include)
        if excluded:
            return Verdict(False, f"excluded by name ({excluded!r})")
        impossible = self._impossible(product)
        if impossible:
            return Verdict(False, self.other_reason(product.module, impossible))
        if included:
            return Verdict(True, f"included by name ({included!r})")
        if trained is not None:
            return Verdict(trained.is_fp8, f"as in training: {trained.reason.partition(PADDED)[0]}")
        if self._recipe.choose is not None:
            is_chosen = self._chosen(product)
            return Verdict(is_chosen, "chosen by choose" if is_chosen else "not chosen by choose")
        place = self._place(product)
        return Verdict(False, place) if place else Verdict(None)

    def other_reason(self, module: str, reason: str) -> str:
        """``reason``, why a product in ``module`` is never in FP8, and what the recipe's names say about it."""
        if matching_pattern(module, self._recipe.exclude):
            return reason
        included = matching_pattern(module, self._recipe.include)
        return reason + (f"; included by name ({included!r}) in vain" if included else "")

    def _impossible(self, product: Product) -> str:
        if product.role is ProductRole.OTHER:
            return _other_reason(product)
        dtypes = {self._program.spec(operand.base).dtype for operand in product.operands}
        others = sorted(dtype_name(dtype) for dtype in dtypes if dtype not in _TWO_BYTES)
        if others:
            return f"operands are {' and '.join(others)}, not of two bytes{self._why_wide(product)}"
        if product.role is ProductRole.WEIGHT_GRADIENT and self._recipe.weight_gradient == "bf16":
            return 'weight gradients are asked for in bf16 (weight_gradient="bf16")'
        return ""

    def _why_wide(self, product: Product) -> str:
        """Why lowering left the layer of ``product`` as it was, where its table tells; with a colon before it."""
        places = {self._program.origin(node).place for node in (product.forward, product.node) if node is not None}
        rows = (row for row in self._program.precision.rows if row.role == PrecisionRole.MATRIX)
        reasons = {row.reason for row in rows if row.origin.place in places}
        return f": {reasons.pop()}" if len(reasons) == 1 else ""

    def _place(self, product: Product) -> str:
        forward = product.forward or product.node
        reason = self._places.head(forward) or self._places.router(forward)
        return reason or edge_layer_of(product.module, self._edges)

    def _chosen(self, product: Product) -> bool:
        facts = facts_of(product, self.weights(product))
        assert self._recipe.choose is not None, "asked only where there is a predicate"
        try:
            answer = self._recipe.choose(facts)
        except Exception as error:
            raise UnsupportedError(
                f"choose raised {type(error).__name__}: {error}, for {facts}; it is expected to say True or False for "
                "every product"
            ) from error
        if not isinstance(answer, bool):
            raise UnsupportedError(
                f"choose is expected to say True or False for every product, came {answer!r} for {facts}"
            )
        return answer


def facts_of(product: Product, weights: tuple[str, ...]) -> ProductFacts:
    """What a predicate is asked about."""
    sizes = (product.rows, product.columns, product.contraction)
    return ProductFacts(product.module, str(product.role), *sizes, weights)


def idle_options(recipe: Recipe, modules: Sequence[str]) -> dict[str, str]:
    """The options of ``recipe`` that name none of ``modules``, with a sentence; a program need not run all of a model,
    so that this is no mistake.
    """
    named = [("exclude", pattern) for pattern in recipe.exclude] + [("include", pattern) for pattern in recipe.include]
    idle = {
        f"{option}={pattern!r}": "names no matrix product of this program"
        for option, pattern in named
        if not any(matching_pattern(module, (pattern,)) for module in modules)
    }
    ends = (("skip_first", recipe.skip_first), ("skip_last", recipe.skip_last))
    if not edge_layers(modules, first=recipe.skip_first, last=recipe.skip_last):
        idle |= {f"{option}={count}": "no repeated layers in this program" for option, count in ends if count}
    return idle


def pad_of(product: Product) -> tuple[int, int, int]:
    """The zeros that rows, columns and contraction of ``product`` need."""
    return 0, -product.columns % MULTIPLE, -product.contraction % MULTIPLE


PADDED = "; padded: "
"""What stands in a reason before ``pad_reason``."""


def pad_reason(product: Product) -> str:
    """Which sizes are no multiple, and to what they are padded at the price of how much more work."""
    sizes = []
    for name, size, more in zip(_size_names(product), _sizes(product), pad_of(product), strict=True):
        if more:
            sizes.append(f"{name} {size} to {size + more}")
    return f"{' and '.join(sizes)}, the next multiple of {MULTIPLE}: {more_work(product):.0%} more work"


def more_work(product: Product) -> float:
    """The part of ``product``'s work that the zeros add."""
    _, columns, contraction = pad_of(product)
    return (product.columns + columns) * (product.contraction + contraction) / (
        product.columns * product.contraction
    ) - 1


def _sizes(product: Product) -> tuple[int, int, int]:
    return product.rows, product.columns, product.contraction


def _size_names(product: Product) -> tuple[str, str, str]:
    """Rows, columns and contraction as parts of the layer."""
    tokens, read, written = "tokens", "input features", "output features"
    match product.role:
        case ProductRole.FORWARD:
            return tokens, written, read
        case ProductRole.INPUT_GRADIENT:
            return tokens, read, written
    return (written, read, tokens) if product.a.kind is OperandKind.GRADIENT else (read, written, tokens)


def _other_reason(product: Product) -> str:
    kinds = {operand.kind for operand in product.operands}
    if kinds == {OperandKind.WEIGHT}:
        return "product of two weights: not supported yet"
    if OperandKind.WEIGHT in kinds:
        known = "a product of two weights" if product.forward is not None else "a product in another form"
        return f"gradient of {known}: not supported yet"
    return "product of two activations, or its gradient: never"
