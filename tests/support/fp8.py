"""Joint programs for FP8 tests, tags written by hand, and the signal-to-noise ratio in decibels."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

import graphopt
from graphopt.ir.fp8_products import ProductRole, find_products
from graphopt.ir.fp8_table import Fp8Row, Fp8Table
from graphopt.ir.program import Program, Stage
from graphopt.operators.fp8 import MATMUL, QUANTIZE, QUANTIZE_BOTH, QUANTIZE_TRANSPOSED
from graphopt.pipeline.default import default_pipeline
from graphopt.precision import Precision, precision_of

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")
DYNAMIC = ("tensorwise", "rowwise", "blockwise")
QUANTIZES = (QUANTIZE, QUANTIZE_BOTH, QUANTIZE_TRANSPOSED)

Pad = tuple[int, int, int]


def joint_program(model: nn.Module, batch: Any, *, precision: str | Precision = "bf16", loss: Any = None) -> Program:
    """Forward and backward of ``model`` after all default passes but those of FP8; a loss of its own or ``loss``."""
    wanted = precision_of(precision)
    forward = graphopt.capture(model, batch, outputs=["loss"], loss=loss)
    forward = default_pipeline(Stage.FORWARD, precision=wanted).run(forward)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return default_pipeline(Stage.JOINT).run(graphopt.differentiate(forward, roots=["loss"], wrt=trained))


def tagged(
    program: Program,
    *,
    pad: Callable[[Any], Pad] = lambda product: (0, 0, 0),
    roles: tuple[str, ...] | None = None,
    skip: Container[str] = (),
) -> Program:
    """A copy of ``program`` in which every product with a weight is tagged: of ``roles``, not named in ``skip``."""
    after = program.copy()
    rows = []
    for product in find_products(after):
        wanted = product.role is not ProductRole.OTHER and (roles is None or product.role in roles)
        wanted = wanted and product.node.name not in skip
        sizes = (product.rows, product.columns, product.contraction)
        rows.append(Fp8Row(product.node.name, product.role, *sizes, wanted, "by hand", pad=pad(product)))
    after.fp8 = Fp8Table("by hand", "cpu", tuple(rows))
    return after


def to_16(product: Any) -> Pad:
    """What is missing to multiples of 16 in columns and contraction."""
    return 0, -product.columns % 16, -product.contraction % 16


def quantized(program: Program) -> list[tuple[str, str]]:
    """What is quantized and to which format, in order, once for each operator."""
    return [(node.args[0].name, node.args[1]) for node in program.ops() if node.target in QUANTIZES]


def num_fp8_products(program: Program) -> int:
    """The number of FP8 products."""
    return sum(node.target is MATMUL for node in program.ops())


def sqnr(expected: torch.Tensor, came: torch.Tensor) -> float:
    """Decibels of ``expected`` over the difference: ``20 log10(|x| / |x - y|)``."""
    wide = expected.double()
    noise = (wide - came.double()).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(wide.norm().item() / noise)
