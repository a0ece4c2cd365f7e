"""What a product of FP8 matrices is: its operands, what it must be, and its value in float64.

Legend: a [M,K], b [K,N], result [M,N]. An operand is codes with scales on a grid (see ``fp8_format``), read as they
lie: the grid of ``b`` counts rows along the contraction. With ``s`` the scales and ``k`` running over the contraction::

    result = round(sum over blocks of k (sum over k in the block of a codes * b codes) * (a's s * b's s) + bias)

A block is 128 of the contraction where an operand has block scales, else all of it. Codes are multiplied exactly; sums,
scales and bias are float32; there is one rounding to the dtype of the result. A scale of NaN makes NaN of all that it
serves, even where the codes are 0.

Scales are multiplied with each other first: a large operand times a small one has a scale like that of its result,
where a sum times the large scale alone could leave float32. The product of two scales overflows only where a result of
codes that sum up to 1 would overflow too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.kernels.fp8_format import FORMATS, Grid, grid_shape, spread

# How many of the contraction share a scale where scales change along it, and the only such grid that is computed.
SCALE_BLOCK = 128
RESULT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODE_DTYPES = tuple(format.dtype for format in FORMATS.values())


@dataclass(frozen=True)
class Operand:
    """A quantized matrix: FP8 ``codes``, of any strides, and f32 ``scale`` on ``grid``, of any strides."""

    codes: Tensor
    scale: Tensor
    grid: Grid

    @property
    def transpose(self) -> Operand:
        """The transposed matrix, in the same memory."""
        return Operand(self.codes.t(), self.scale.t(), (self.grid[1], self.grid[0]))

    def value(self) -> Tensor:
        """f64: what codes and scales stand for."""
        return self.codes.double() * spread(self.scale.double(), self.grid, self.codes.shape)


@dataclass(frozen=True)
class Product:
    """``a @ b + bias`` in ``dtype``. ``bias``: float [N] or None.

    ``fast_accumulation``: on Hopper, leave sums to the matrix unit, which keeps fewer bits than float32.
    """

    a: Operand
    b: Operand
    bias: Tensor | None
    dtype: torch.dtype
    fast_accumulation: bool = False

    @property
    def m(self) -> int:
        """Rows of the result."""
        return self.a.codes.shape[0]

    @property
    def n(self) -> int:
        """Columns of the result."""
        return self.b.codes.shape[1]

    @property
    def k(self) -> int:
        """Length of the contraction."""
        return self.a.codes.shape[1]

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.a.codes.device

    @property
    def has_block_scales(self) -> bool:
        """Whether scales change along the contraction."""
        return bool(self.a.grid[1] or self.b.grid[0])


def reference(product: Product) -> Tensor:
    """The result, computed in float64 and rounded once: what every implementation is compared with."""
    exact = product.a.value() @ product.b.value()
    return (exact if product.bias is None else exact + product.bias.double()).to(product.dtype)


def check_product(product: Product) -> None:
    """ValueError that says what was expected and what came, if ``product`` cannot be computed."""
    _check_operand("a", product.a, contraction_dim=1)
    _check_operand("b", product.b, contraction_dim=0)
    if product.b.codes.shape[0] != product.k:
        raise ValueError(
            f"a {list(product.a.codes.shape)} and b {list(product.b.codes.shape)} cannot be multiplied: expected "
            f"as many rows of b as a has columns"
        )
    if product.dtype not in RESULT_DTYPES:
        raise ValueError(f"the result of an FP8 product is bfloat16, float16 or float32, came {product.dtype}")
    if product.bias is not None and tuple(product.bias.shape) != (product.n,):
        raise ValueError(f"bias expects shape [{product.n}], came {list(product.bias.shape)}")
    tensors = (product.a.scale, product.b.codes, product.b.scale, product.bias)
    if wrong := [tensor.device for tensor in tensors if tensor is not None and tensor.device != product.device]:
        raise ValueError(f"all tensors of an FP8 product lie on one device, came {product.device} and {wrong[0]}")


def _check_operand(name: str, operand: Operand, *, contraction_dim: int) -> None:
    codes, scale = operand.codes, operand.scale
    if codes.dim() != 2 or codes.dtype not in CODE_DTYPES:
        expected = " or ".join(str(dtype) for dtype in CODE_DTYPES)
        raise ValueError(f"{name} expects a matrix of {expected}, came {codes.dtype} {list(codes.shape)}: quantize it")
    along, across = operand.grid[contraction_dim], operand.grid[1 - contraction_dim]
    if along not in (0, SCALE_BLOCK) or across not in (0, 1, SCALE_BLOCK):
        raise ValueError(
            f"{name} expects scales that serve 0 (all) or {SCALE_BLOCK} along the contraction and 0, 1 or "
            f"{SCALE_BLOCK} across it, came the grid {operand.grid}"
        )
    expected_shape = grid_shape(codes.shape, operand.grid)
    if tuple(scale.shape) != expected_shape or scale.dtype != torch.float32:
        raise ValueError(
            f"the scale of {name} {list(codes.shape)} on the grid {operand.grid} is float32 {list(expected_shape)}, "
            f"came {scale.dtype} {list(scale.shape)}"
        )
