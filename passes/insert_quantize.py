"""Put quantize operators before the products that are tagged for FP8, and make them FP8 products.

Before (``mm`` is tagged, recipe tensorwise)::

    t: 'bf16[K,N]' = aten.t.default(low)                 # low: bf16 copy of weight f32[N,K]
    mm: 'bf16[M,N]' = aten.mm.default(x, t)

After::

    quantize_fp8 = graphopt.quantize_fp8.default(x, 'e4m3', [0, 0], False)
    codes: 'f8e4m3[M,K]', scale: 'f32[1,1]' = quantize_fp8
    quantize_fp8_1 = graphopt.quantize_fp8.default(weight, 'e4m3', [0, 0], False)
    mm: 'bf16[M,N]' = graphopt.fp8_matmul.default(codes, scale, [0, 0], t(codes_1), t(scale_1), [0, 0], None, bf16)

A value is quantized once for each format and grid that its readers need, whichever view of it they read, right where it
is made: so the backward part reads the codes, one byte an element, and the value itself may die in the forward part. A
weight is quantized from what it is stored as, never from its low-precision copy: one rounding instead of two, and the
copy is not needed.

``layouts``: "two" where products read operands with the contraction contiguous alone (compute capability 8.9, 9.0,
12.x). Then ``quantize_fp8_transposed`` takes the place of ``quantize_fp8`` for what is read the other way, and
``quantize_fp8_both`` makes both in one pass over a value that is read both ways. With "one", readers take transposed
views. "auto" asks the recipe's target, or the device. Codes and scales are the same bit by bit.

A product whose tag says so is padded with zeros: its codes, in the dimensions that are no multiple of 16; its result is
cut back to size.

Saves ``K * M`` bytes of each activation that only products read. Costs one pass over each operand; in two layouts
another byte an element. Numerics: lossy; E4M3 keeps 4 bits of each number, E5M2 3.

Refuses a tagged product that does not give bfloat16 or float16, or whose operands are of another type.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import fx

from graphopt.errors import ProgramError, UnsupportedError
from graphopt.fp8 import Recipe, Tensorwise, recipe_of
from graphopt.ir.erase import erase_dead
from graphopt.ir.fp8_grids import Grid, transposed
from graphopt.ir.fp8_padding import cut_back, pad_bias, pad_matrix, pad_scale
from graphopt.ir.fp8_products import Product, find_products
from graphopt.ir.fp8_reads import QUANTIZABLE, Copy, ProductReads, Read, Request, reads_of, requests_of
from graphopt.ir.fp8_table import Fp8Row
from graphopt.ir.program import Program, Stage
from graphopt.operators.fp8 import MATMUL, QUANTIZE, QUANTIZE_BOTH, QUANTIZE_TRANSPOSED
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal
from graphopt.planner.fp8_setting import needs_two_layouts

aten = torch.ops.aten

Layouts = Literal["auto", "one", "two"]

_DEFAULT = Tensorwise()
_RESULTS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class InsertQuantize(Pass):
    """See the module's docstring. ``recipe``: a ``graphopt.fp8`` value, its name or its text."""

    recipe: Recipe | str = _DEFAULT
    layouts: Layouts = "auto"

    name: ClassVar[str] = "insert-quantize"
    stage: ClassVar[Stage] = Stage.JOINT
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    tolerance: ClassVar[float | None] = (
        0.5  # four roundings to E5M2, of 2**-3 each: an operand of each product in a row
    )
    after: ClassVar[tuple[str, ...]] = ("tag-fp8",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", recipe_of(self.recipe))
        if self.layouts not in ("auto", "one", "two"):
            raise UnsupportedError(f"layouts expects 'auto', 'one' or 'two', came {self.layouts!r}")

    def apply(self, program: Program) -> Changes:
        """Rewrite every tagged product that is still one."""
        rows = {row.value: row for row in program.fp8.eligible}
        tagged = [product for product in find_products(program) if product.node.name in rows]
        refusals = tuple(filter(None, (_refusal(program, product) for product in tagged)))
        refused = {refusal.node for refusal in refusals}
        products = [product for product in tagged if product.node.name not in refused]
        recipe = recipe_of(self.recipe)
        reads = tuple(reads_of(item, recipe, two_layouts=self._takes_two(program, item, recipe)) for item in products)
        rewriter = _Rewriter(program, _make_copies(program, requests_of(program, reads), recipe))
        for item in reads:
            rewriter.rewrite(item, rows[item.product.node.name])
        if products:
            program.refresh()  # views of a product share the memory of the new one
        return Changes(len(products), refusals)

    def _takes_two(self, program: Program, product: Product, recipe: Recipe) -> bool:
        if self.layouts == "auto":
            return needs_two_layouts(recipe, program.spec(product.node).device)
        return self.layouts == "two"


def _refusal(program: Program, product: Product) -> Refusal | None:
    if program.spec(product.node).dtype not in _RESULTS:
        return Refusal.at(product.node, f"gives {program.spec(product.node)}; FP8 products give bf16 or f16")
    for operand in product.operands:
        if program.spec(operand.base).dtype not in QUANTIZABLE:
            return Refusal.at(product.node, f"reads {program.spec(operand.base)}, which is not quantized to FP8")
    return None


# ---- quantizing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantized:
    """Codes and scales as they are stored: those of a matrix, or turned, those of its transpose."""

    codes: fx.Node
    scale: fx.Node
    grid: Grid


def _make_copies(program: Program, requests: tuple[Request, ...], recipe: Recipe) -> dict[Copy, _Quantized]:
    """A quantize operator for each of ``requests``, or one for two that are the same matrix in both layouts."""
    of_matrix: dict[object, list[Request]] = defaultdict(list)
    for request in requests:
        of_matrix[request.copy.matrix, request.copy.format].append(request)
    made: dict[Copy, _Quantized] = {}
    for group in of_matrix.values():
        straight = [request for request in group if not request.copy.is_turned]
        turned = [request for request in group if request.copy.is_turned]
        if len(straight) == 1 and len(turned) == 1:
            made |= _make_both(program, group[0], straight[0].copy, turned[0].copy, recipe)
        else:
            made |= {request.copy: _make_one(program, request, recipe) for request in group}
    return made


def _make_one(program: Program, request: Request, recipe: Recipe) -> _Quantized:
    copy = request.copy
    grid, target = (transposed(copy.grid), QUANTIZE_TRANSPOSED) if copy.is_turned else (copy.grid, QUANTIZE)
    arguments = (request.value, copy.format, list(grid), recipe.power_of_two)
    codes, scale = _call(program, request, target, arguments, num_results=2)
    return _Quantized(codes, scale, grid)


def _make_both(
    program: Program, request: Request, straight: Copy, turned: Copy, recipe: Recipe
) -> dict[Copy, _Quantized]:
    grid, grid_t = straight.grid, transposed(turned.grid)
    arguments = (request.value, straight.format, list(grid), list(grid_t), recipe.power_of_two)
    codes, scale, codes_t, scale_t = _call(program, request, QUANTIZE_BOTH, arguments, num_results=4)
    return {straight: _Quantized(codes, scale, grid), turned: _Quantized(codes_t, scale_t, grid_t)}


def _call(
    program: Program, request: Request, target: object, arguments: tuple[object, ...], *, num_results: int
) -> list[fx.Node]:
    """The results of an operator where ``request`` wants them."""
    origin = request.value if request.value.op == "call_function" else request.anchor
    call = program.insert_before(request.anchor, target, *arguments, origin_of=origin)  # type: ignore[arg-type]
    return [
        program.insert_before(request.anchor, operator.getitem, call, i, origin_of=origin) for i in range(num_results)
    ]


# ---- products ----------------------------------------------------------------------------------------------------


@dataclass
class _Rewriter:
    """Rewrites products that read ``copies``; remembers what is padded already."""

    program: Program
    copies: dict[Copy, _Quantized]
    padded: dict[tuple[fx.Node, tuple[int, int]], _Quantized] = field(default_factory=dict)

    def rewrite(self, reads: ProductReads, row: Fp8Row) -> None:
        """The product in FP8, under its name."""
        product, node = reads.product, reads.product.node
        rows, columns, contraction = row.pad
        spec = self.program.spec(node)
        a = self._operand(reads.a, (rows, contraction), node)
        b = self._operand(reads.b, (contraction, columns), node)
        bias = pad_bias(self.program, node, product.bias, columns)
        fresh = self.program.insert_before(node, MATMUL, *a, *b, bias, spec.dtype)
        fresh = cut_back(self.program, node, fresh, product.rows, product.columns)
        if self.program.spec(fresh) != spec:
            raise ProgramError(f"{node.name} is {spec}, in FP8 {self.program.spec(fresh)}")
        sources = node.all_input_nodes
        self.program.take_over(node, fresh)
        erase_dead(self.program, sources)

    def _operand(self, read: Read, added: tuple[int, int], reader: fx.Node) -> tuple[fx.Node, fx.Node, list[int]]:
        """Codes, scales and grid as ``reader`` takes them, with ``added`` zeros in both dimensions."""
        found = self.copies[Copy.read_by(read)]
        stored_added = added[::-1] if read.codes_are_transposed else added
        found = self._padded(found, (stored_added[0], stored_added[1]), reader)
        grid = list(read.operand_grid)
        if not read.codes_are_transposed:
            return found.codes, found.scale, grid
        codes, scale = (
            self.program.insert_before(reader, aten.t.default, value) for value in (found.codes, found.scale)
        )
        return codes, scale, grid

    def _padded(self, found: _Quantized, added: tuple[int, int], reader: fx.Node) -> _Quantized:
        if added == (0, 0):
            return found
        key = (found.codes, added)
        if key not in self.padded:
            shape = self.program.spec(found.codes).shape
            codes = pad_matrix(self.program, reader, found.codes, added, 0.0)
            scale = pad_scale(self.program, reader, found.scale, found.grid, shape=(shape[0], shape[1]), added=added)
            self.padded[key] = _Quantized(codes, scale, found.grid)
        return self.padded[key]
