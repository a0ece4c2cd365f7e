"""The FP8 table of a program: rules first, then sizes, then costs of all products together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from graphopt.fp8 import Recipe
from graphopt.ir import ops
from graphopt.ir.fp8_other_products import OtherProduct, find_other_products
from graphopt.ir.fp8_products import Operand, OperandKind, Product, ProductRole, find_products
from graphopt.ir.fp8_table import NO_PAD, Fp8Row, Fp8Table
from graphopt.ir.fp8_trained import Decision, ForwardProduct
from graphopt.ir.liveness import backward_nodes
from graphopt.ir.origin import Origin
from graphopt.ir.precision_ops import qualified_name
from graphopt.ir.program import Program
from graphopt.ir.storage import storage_map
from graphopt.ir.text import target_text
from graphopt.planner.fp8_choice import LEAST_GAIN, Prices, choose_products
from graphopt.planner.fp8_costs import CostedProduct, Fp8Costs, Rates, Use, Value
from graphopt.planner.fp8_rules import MOST_EMULATED_WORK, PADDED, Rules, Verdict, more_work, pad_of, pad_reason
from graphopt.planner.fp8_setting import Setting, setting_of


def decide_products(program: Program, recipe: Recipe, *, micro_steps: int = 1) -> Fp8Table:
    """A row for every product of ``program``, in order. ``micro_steps``: that one quantization of a weight serves.

    Where ``program.fp8.trained`` has decisions about forward products, they count before costs.

    Raises UnsupportedError for a target that is not known, and for a predicate that raises or says neither yes nor no.
    """
    products = find_products(program)
    others = find_other_products(program, frozenset(product.node for product in products))
    setting = setting_of(recipe, _device(program, [*(p.node for p in products), *(o.node for o in others)]))
    rules = Rules(program, recipe, products)
    decided = _Decided(program, products, rules=rules, setting=setting, recipe=recipe, micro_steps=micro_steps)
    rows = {product.node: [decided.row(position)] for position, product in enumerate(products)}
    for other in others:
        rows.setdefault(other.node, []).append(_other_row(program, other, rules))
    ordered = [row for node in program.ops() for row in rows.get(node, ())]
    return Fp8Table(recipe.name, setting.name, tuple(ordered), trained=program.fp8.trained)


class _Decided:
    """The decisions about ``products``."""

    def __init__(
        self,
        program: Program,
        products: Sequence[Product],
        *,
        rules: Rules,
        setting: Setting,
        recipe: Recipe,
        micro_steps: int,
    ) -> None:
        self._program = program
        self._rules = rules
        self._setting = setting
        self._products = products
        trained = _trained(program, products)
        self._verdicts = [self._verdict(product, trained.get(product.node)) for product in products]
        self._prices: Prices | None = None
        if setting.rates is None:
            self._chosen = tuple(verdict.is_fp8 is not False for verdict in self._verdicts)
        else:
            costed = [_costed(program, product, micro_steps) for product in products]
            self._prices = _prices(setting.rates, recipe, costed)
            fixed = {i: verdict.is_fp8 for i, verdict in enumerate(self._verdicts) if verdict.is_fp8 is not None}
            self._chosen = choose_products(self._prices, fixed)
            self._quantize = self._prices.quantize_seconds(self._chosen)
        chosen = {product.node for product, is_fp8 in zip(products, self._chosen, strict=True) if is_fp8}
        self._bytes_saved = {} if recipe.saved == "none" else kept_less(program, products, frozenset(chosen))

    def row(self, position: int) -> Fp8Row:
        """The row of the product at ``position``."""
        product, is_fp8 = self._products[position], self._chosen[position]
        seconds = (0.0, 0.0, 0.0)
        if self._prices is not None:
            seconds = (self._prices.bf16[position], self._prices.fp8[position], self._quantize[position])
        row = Fp8Row(
            value=product.node.name,
            role=str(product.role),
            rows=product.rows,
            columns=product.columns,
            contraction=product.contraction,
            is_fp8=is_fp8,
            reason="",
            origin=_origin(self._program, product),
            weights=self._rules.weights(product),
            pad=pad_of(product) if is_fp8 else NO_PAD,
            layer=(product.forward or product.node).name,
            operator=target_text(product.node.target),
            bf16_seconds=seconds[0],
            fp8_seconds=seconds[1],
            quantize_seconds=seconds[2],
            bytes_saved=self._bytes_saved.get(product.node, 0),
        )
        return _with_reason(row, product, self._verdicts[position], self._setting)

    def _verdict(self, product: Product, trained: Decision | None) -> Verdict:
        """The rules, the device, and where costs are not counted the work that padding adds."""
        verdict = self._rules.verdict(product, trained)
        if verdict.is_fp8 is False:
            return verdict
        if self._setting.reason:
            return Verdict(False, self._setting.reason)
        if not product.rows * product.columns * product.contraction:
            return Verdict(False, "nothing to multiply")
        is_free = self._setting.rates is None and verdict.is_fp8 is None
        if is_free and more_work(product) > MOST_EMULATED_WORK:
            return Verdict(False, f"padding does not pay: {pad_reason(product)}, at most {MOST_EMULATED_WORK:.0%}")
        return verdict


def _origin(program: Program, product: Product) -> Origin:
    """Where ``product`` comes from; a gradient whose own origin tells another module than its layer's has that of the
    layer's forward product.
    """
    own = program.origin(product.node)
    if own.module == product.module or product.forward is None:
        return own
    return replace(program.origin(product.forward), is_gradient=True)


def _trained(program: Program, products: Sequence[Product]) -> dict[fx.Node, Decision]:
    """What training decided about ``products``; empty in a training program."""
    forward = [product for product in products if product.role is ProductRole.FORWARD]
    described = [
        ForwardProduct(item.module, item.weights, (item.rows, item.columns, item.contraction)) for item in forward
    ]
    found = zip(forward, program.fp8.trained.about(described), strict=True)
    return {product.node: decision for product, decision in found if decision is not None}


def _with_reason(row: Fp8Row, product: Product, verdict: Verdict, setting: Setting) -> Fp8Row:
    padded = PADDED + pad_reason(product) if any(pad_of(product)) and verdict.is_fp8 is not False else ""
    if verdict.is_fp8 is not None:
        return replace(row, reason=verdict.reason + padded)
    if setting.rates is None:
        return replace(row, reason=f"eligible; emulation, so costs are not counted{padded}")
    return replace(row, reason=_cost_reason(row, setting.rates) + padded)


def _cost_reason(row: Fp8Row, rates: Rates) -> str:
    if row.is_fp8 and row.seconds_saved > 0:
        return f"saves time on {rates.name}"
    if row.is_fp8:
        return "pays together with the products that share its operands"
    kind = "below break-even" if row.seconds_saved <= 0 else f"saves less than {LEAST_GAIN:.0%}"
    return f"{kind} on {rates.name}"


def _other_row(program: Program, other: OtherProduct, rules: Rules) -> Fp8Row:
    origin = program.origin(other.node)
    return Fp8Row(
        value=other.node.name,
        role=str(other.role),
        rows=other.rows,
        columns=other.columns,
        contraction=other.contraction,
        is_fp8=False,
        reason=rules.other_reason(origin.module, other.reason),
        origin=origin,
        batch=other.batch,
        layer=f"{origin.module}:{qualified_name(other.node).removesuffix('_backward')}",
        operator=target_text(other.node.target),
    )


def _prices(rates: Rates, recipe: Recipe, products: Sequence[CostedProduct]) -> Prices:
    costs = Fp8Costs(rates, recipe)
    return Prices(
        tuple(map(costs.bf16_seconds, products)), tuple(map(costs.fp8_seconds, products)), costs.shared(products)
    )


def _costed(program: Program, product: Product, micro_steps: int) -> CostedProduct:
    left = Use(_value(program, product.a, micro_steps), product.a.is_transposed)
    right = Use(_value(program, product.b, micro_steps), not product.b.is_transposed)
    return CostedProduct(product.rows, product.columns, product.contraction, left, right, pad_of(product))


def _value(program: Program, operand: Operand, micro_steps: int) -> Value:
    spec = program.spec(operand.source)
    is_weight = operand.kind is OperandKind.WEIGHT
    return Value(
        operand.source.name,
        program.spec(operand.base).numel,
        spec.dtype.itemsize,
        is_fused=not is_weight and _is_fusable(operand.base),
        is_weight=is_weight,
        shared_by=micro_steps if is_weight else 1,
    )


def _is_fusable(node: fx.Node) -> bool:
    """Whether what makes ``node`` can quantize it on the way."""
    while ops.keeps_order(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and (ops.is_pointwise(node) or ops.is_normalised_row(node))


def kept_less(program: Program, products: Sequence[Product], chosen: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Bytes that each of ``chosen`` lets the backward part keep less: where all that reads an activation there is in
    FP8, its codes are kept in its place. Each activation counts once, for the first product that reads it.
    """
    backward, storages = backward_nodes(program), storage_map(program)
    holders: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        for number in storages.held.get(node, ()):
            holders.setdefault(number, []).append(node)
    found: dict[fx.Node, int] = {}
    counted: set[int] = set()
    for product in products:
        if product.node not in chosen or product.node not in backward:
            continue
        for operand in product.operands:
            numbers = set(storages.held[operand.base])
            if operand.kind is not OperandKind.ACTIVATION or numbers & (counted | storages.resident):
                continue
            aliases = {node for number in numbers for node in holders[number]}
            readers = {user for node in aliases for user in node.users if user not in aliases}
            if all(user in chosen or (user.op != "output" and user not in backward) for user in readers):
                counted |= numbers
                spec = program.spec(operand.base)
                found[product.node] = spec.nbytes - spec.numel
    return found


def _device(program: Program, nodes: Sequence[fx.Node]) -> torch.device:
    for node in nodes:
        for argument in node.all_input_nodes:
            value = argument.meta.get("val")
            if isinstance(value, torch.Tensor):
                return value.device
    return torch.device("cpu")
