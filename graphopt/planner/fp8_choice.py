"""Which products to run in FP8, where operands are quantized for several of them together: an exact minimum cut.

Each product saves what it saves; each quantization is paid if any product that reads it is in FP8, however many are; a
cast is paid if any product is in bfloat16. So no product can be decided alone: three projections of one input may pay
together where none does by itself. The cheapest of all choices is a minimum s-t cut (project selection), with products
and shared costs as vertices; what is cut off from the source runs in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from graphopt.planner.fp8_costs import SharedCost

LEAST_GAIN = 0.05
"""Of a product's time in bfloat16 that FP8 must save, quantization counted: less is within what estimates are wrong by,
and costs accuracy for nothing."""

_SOURCE, _SINK, _FIRST = 0, 1, 2
# scipy's flow is in 32-bit integers; the sum of everything finite must stay below what stands for "never".
_NEVER = 2**30
_FINITE_SUM = 2**28


@dataclass(frozen=True)
class Prices:
    """Seconds of each product in bfloat16 and in FP8, and what they share."""

    bf16: tuple[float, ...]
    fp8: tuple[float, ...]
    shared: tuple[SharedCost, ...]

    def total(self, chosen: Sequence[bool]) -> float:
        """Seconds of everything when the ``chosen`` products run in FP8."""
        own = sum(fp8 if is_fp8 else bf16 for bf16, fp8, is_fp8 in zip(self.bf16, self.fp8, chosen, strict=True))
        return own + sum(cost.seconds for cost in self.shared if _is_paid(cost, chosen))

    def quantize_seconds(self, chosen: Sequence[bool]) -> tuple[float, ...]:
        """The part of each product in the shared costs: in FP8 its share with the others that pay, less its share of a
        cast that nobody needs any more; in bfloat16 what it would have to pay beside the ``chosen``.
        """
        found = [0.0] * len(self.bf16)
        for cost in self.shared:
            users = [position for position in cost.products if chosen[position]]
            if not cost.is_bf16:
                for position in cost.products:
                    found[position] += cost.seconds / len(users) if chosen[position] else cost.seconds * (not users)
            elif len(users) == len(cost.products):
                for position in users:
                    found[position] -= cost.seconds / len(users)
            elif len(users) == len(cost.products) - 1:
                (last,) = set(cost.products) - set(users)
                found[last] -= cost.seconds
        return tuple(found)


def choose_products(prices: Prices, fixed: Mapping[int, bool], *, least_gain: float = LEAST_GAIN) -> tuple[bool, ...]:
    """Whether each product runs in FP8, so that all of it takes least; ``fixed``: products that are decided already.

    A product in bfloat16 counts ``least_gain`` less than it takes: that is what FP8 must save at least.
    """
    num_products = len(prices.bf16)
    edges: list[tuple[int, int, float]] = []
    for position in range(num_products):
        vertex = _FIRST + position
        if position in fixed:
            edges.append((_SOURCE, vertex, -1.0) if fixed[position] else (vertex, _SINK, -1.0))
            continue
        edges.append((_SOURCE, vertex, prices.bf16[position] * (1 - least_gain)))
        edges.append((vertex, _SINK, prices.fp8[position]))
    for number, cost in enumerate(prices.shared):
        vertex = _FIRST + num_products + number
        edges.append((_SOURCE, vertex, cost.seconds) if cost.is_bf16 else (vertex, _SINK, cost.seconds))
        for position in cost.products:
            product = _FIRST + position
            edges.append((vertex, product, -1.0) if cost.is_bf16 else (product, vertex, -1.0))
    reached = _source_side(edges, _FIRST + num_products + len(prices.shared))
    return tuple(_FIRST + position in reached for position in range(num_products))


def _source_side(edges: Sequence[tuple[int, int, float]], size: int) -> frozenset[int]:
    """The vertices with the source in a minimum cut; a capacity below 0 stands for one that is never cut."""
    total = sum(max(capacity, 0.0) for _, _, capacity in edges)
    scale = _FINITE_SUM / total if total else 1.0
    capacities = [_NEVER if capacity < 0 else int(capacity * scale) for _, _, capacity in edges]
    tails, heads = [tail for tail, _, _ in edges], [head for _, head, _ in edges]
    network = coo_matrix((capacities, (tails, heads)), shape=(size, size), dtype=np.int32).tocsr()
    flow = maximum_flow(network, _SOURCE, _SINK).flow
    residual = (network - flow).tocsr()
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    return frozenset(breadth_first_order(residual, _SOURCE, return_predecessors=False).tolist())


def _is_paid(cost: SharedCost, chosen: Sequence[bool]) -> bool:
    if cost.is_bf16:
        return not all(chosen[position] for position in cost.products)
    return any(chosen[position] for position in cost.products)
