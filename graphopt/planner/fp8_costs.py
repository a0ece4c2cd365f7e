"""What FP8 costs and saves: seconds of products in bfloat16 and FP8, and of the passes that quantize their operands.

An operand is quantized once for all products that read it in one layout; so its cost belongs to none of them alone:

====================  =================================================  ====================================
recipe                read once for all layouts                          for each layout
====================  =================================================  ====================================
tensorwise            the largest value, then the cast: twice            written
delayed               the cast: once                                     written
rowwise               once, a whole row at a time                        written; along columns read once more
blockwise             once, a block at a time                            written
====================  =================================================  ====================================

Where both operands must have the contraction contiguous (Ada, Hopper), a value that is contracted along both of its
dimensions is written in two layouts, else once; rowwise writes two in any case, for the scales differ. A producer that
is pointwise or a normalisation hands its numbers on in registers: the first reading costs nothing. Weights are
quantized once for all micro-steps of an update, from what they are stored as; where all products of a float32 weight
are in FP8, nobody needs its cast to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphopt.fp8 import Blockwise, Delayed, Recipe, Rowwise
from graphopt.planner.fp8_devices import DeviceClass

_SCALE_BYTES = 4
_BLOCK = 128


@dataclass(frozen=True)
class Value:
    """What products read, quantized once for all of them. ``name``: different for different values; ``elements``,
    ``element_bytes``: as it is stored; ``is_fused``: its producer quantizes it on the way; ``shared_by``: micro-steps
    that one quantization serves.
    """

    name: str
    elements: int
    element_bytes: int = 2
    is_fused: bool = False
    is_weight: bool = False
    shared_by: int = 1


@dataclass(frozen=True)
class Use:
    """A product's reading of ``value``. ``turned``: contracted along its first dimension, not along its last, so that
    codes with the contraction contiguous are those of its transpose.
    """

    value: Value
    turned: bool


@dataclass(frozen=True)
class CostedProduct:
    """``[rows, contraction] @ [contraction, columns]`` of ``left`` and ``right``; ``pad``: zeros added to each size."""

    rows: int
    columns: int
    contraction: int
    left: Use
    right: Use
    pad: tuple[int, int, int] = (0, 0, 0)

    @property
    def uses(self) -> tuple[Use, Use]:
        """Both readings."""
        return self.left, self.right

    @property
    def padded(self) -> tuple[int, int, int]:
        """Rows, columns and contraction with the zeros."""
        rows, columns, contraction = self.pad
        return self.rows + rows, self.columns + columns, self.contraction + contraction


@dataclass(frozen=True)
class SharedCost:
    """``seconds`` paid once if any of ``products`` (by position) runs in FP8, or in bfloat16 if ``is_bf16``."""

    seconds: float
    products: tuple[int, ...]
    is_bf16: bool = False


class Rates(Protocol):
    """How fast a device is: estimated (``AnalyticRates``) or measured."""

    @property
    def name(self) -> str:
        """As people read it."""
        ...

    @property
    def needs_two_layouts(self) -> bool:
        """Whether both operands must have the contraction contiguous."""
        ...

    def bf16_seconds(self, rows: int, columns: int, contraction: int) -> float:
        """Of a product in bfloat16."""
        ...

    def fp8_seconds(self, rows: int, columns: int, contraction: int) -> float:
        """Of a product of codes that are there."""
        ...

    def pass_seconds(self, num_bytes: float) -> float:
        """Of a pass over memory that reads and writes ``num_bytes`` together, its call included."""
        ...


@dataclass(frozen=True)
class AnalyticRates:
    """Rates of a device class under a recipe: the larger of computing and moving, and a call."""

    device: DeviceClass
    recipe: Recipe

    @property
    def name(self) -> str:
        """The class, and that nothing was measured."""
        assumed = f"rates of {self.device.like} assumed" if self.device.like else "estimated rates"
        return f"{self.device.name} ({assumed})"

    @property
    def needs_two_layouts(self) -> bool:
        """As the device says."""
        return self.device.support.needs_two_layouts

    def bf16_seconds(self, rows: int, columns: int, contraction: int) -> float:
        """Two bytes in, two bytes out."""
        flops = self.device.bf16_flops * self.device.product_efficiency
        return self._product_seconds((rows, columns, contraction), flops, operand_bytes=2)

    def fp8_seconds(self, rows: int, columns: int, contraction: int) -> float:
        """One byte in, two bytes out."""
        efficiency = self.device.product_efficiency * self._scales_efficiency()
        return self._product_seconds((rows, columns, contraction), self.device.fp8_flops * efficiency, operand_bytes=1)

    def pass_seconds(self, num_bytes: float) -> float:
        """By the bandwidth that passes reach."""
        return self.device.call_seconds + self._moving(num_bytes)

    def _scales_efficiency(self) -> float:
        if isinstance(self.recipe, Rowwise):
            return self.device.row_scales_efficiency
        return self.device.block_scales_efficiency if isinstance(self.recipe, Blockwise) else 1.0

    def _product_seconds(self, sizes: tuple[int, int, int], flops: float, *, operand_bytes: int) -> float:
        rows, columns, contraction = sizes
        moved = operand_bytes * contraction * (rows + columns) + 2 * rows * columns
        computing = 2 * rows * columns * contraction / flops
        moving = self._moving(moved) if self.device.waits_for_memory else 0.0
        return self.device.call_seconds + max(computing, moving)

    def _moving(self, num_bytes: float) -> float:
        return num_bytes / (self.device.bandwidth * self.device.bandwidth_efficiency)


@dataclass(frozen=True)
class Fp8Costs:
    """The costs of products under ``recipe`` at ``rates``."""

    rates: Rates
    recipe: Recipe

    def bf16_seconds(self, product: CostedProduct) -> float:
        """Of ``product`` in bfloat16, as it is."""
        return self.rates.bf16_seconds(product.rows, product.columns, product.contraction)

    def fp8_seconds(self, product: CostedProduct) -> float:
        """Of ``product`` in FP8, operands quantized before, padding included."""
        return self.rates.fp8_seconds(*product.padded) + self._pad_seconds(product)

    def shared(self, products: Sequence[CostedProduct]) -> tuple[SharedCost, ...]:
        """What ``products`` pay together: a SharedCost for each value, for each of its layouts, for each cast saved."""
        readers: dict[Value, dict[bool, list[int]]] = {}
        for position, product in enumerate(products):
            for use in product.uses:
                turned = use.turned and self._has_two_kinds(use.value)
                readers.setdefault(use.value, {}).setdefault(turned, []).append(position)
        return tuple(cost for value, layouts in readers.items() for cost in self._of_value(value, layouts))

    def _of_value(self, value: Value, layouts: dict[bool, list[int]]) -> list[SharedCost]:
        everyone = tuple(sorted({position for positions in layouts.values() for position in positions}))
        found = [SharedCost(self._base_seconds(value) / value.shared_by, everyone)]
        for turned, positions in layouts.items():
            seconds = self._layout_seconds(value, turned) / value.shared_by
            found.append(SharedCost(seconds, tuple(dict.fromkeys(positions))))
        if value.is_weight and value.element_bytes > 2:
            cast = self.rates.pass_seconds(value.elements * (value.element_bytes + 2))
            found.append(SharedCost(cast, everyone, is_bf16=True))
        return found

    def _has_two_kinds(self, value: Value) -> bool:
        """Whether codes for both contractions of ``value`` are different ones."""
        is_by_rows = isinstance(self.recipe, Rowwise) or (isinstance(self.recipe, Blockwise) and not value.is_weight)
        return is_by_rows or self.rates.needs_two_layouts

    def _base_seconds(self, value: Value) -> float:
        """What is paid once, however many layouts: calls, and readings that all share."""
        size = value.elements * value.element_bytes
        first = 0 if value.is_fused else size
        if not isinstance(self.recipe, (Delayed, Rowwise, Blockwise)):
            # The largest value of all must be known before the first code is written.
            largest = 0.0 if value.is_fused else self.rates.pass_seconds(size)
            return largest + self.rates.pass_seconds(size)
        return self.rates.pass_seconds(first)

    def _layout_seconds(self, value: Value, turned: bool) -> float:
        """What one layout adds: its codes and scales, and for scales along columns the whole columns once more."""
        moved = float(value.elements)
        if isinstance(self.recipe, Blockwise):
            moved += value.elements / _BLOCK * _SCALE_BYTES
        if isinstance(self.recipe, Rowwise) and turned:
            moved += value.elements * value.element_bytes
        return self._moving(moved)

    def _pad_seconds(self, product: CostedProduct) -> float:
        """Of copying what is padded, in codes, and of copying the result out of what is too wide."""
        if not any(product.pad):
            return 0.0
        rows, columns, contraction = product.padded
        more_rows, more_columns, more_contraction = product.pad
        moved = 0
        if more_rows or more_contraction:
            moved += 2 * rows * contraction
        if more_columns or more_contraction:
            moved += 2 * columns * contraction
        if more_rows or more_columns:
            moved += 4 * product.rows * product.columns
        return self.rates.pass_seconds(moved)

    def _moving(self, num_bytes: float) -> float:
        """Of ``num_bytes`` more in a pass that runs anyway."""
        return self.rates.pass_seconds(num_bytes) - self.rates.pass_seconds(0)


def layer_products(
    tokens: int, columns: int, contraction: int, *, weight_bytes: int = 2, is_fused: bool = False, micro_steps: int = 1
) -> tuple[CostedProduct, CostedProduct, CostedProduct]:
    """Forward, input-gradient and weight-gradient product of a layer of its own, ``[tokens, contraction]`` to
    ``[tokens, columns]``; ``is_fused``: producers quantize what it reads and its gradient.
    """
    read = Value("input", tokens * contraction, is_fused=is_fused)
    gradient = Value("gradient", tokens * columns, is_fused=is_fused)
    weight = Value("weight", columns * contraction, weight_bytes, is_weight=True, shared_by=micro_steps)
    return (
        CostedProduct(tokens, columns, contraction, Use(read, False), Use(weight, False)),
        CostedProduct(tokens, contraction, columns, Use(gradient, False), Use(weight, True)),
        CostedProduct(columns, contraction, tokens, Use(gradient, True), Use(read, True)),
    )
