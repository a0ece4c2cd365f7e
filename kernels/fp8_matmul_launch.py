"""How the Triton kernels of FP8 products are launched: operands as they must lie, descriptors, what is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graphopt.kernels.fp8_matmul_tiles import GROUP, Family, Tile, family_of, promote_every
from graphopt.kernels.fp8_matmul_triton import fp8_block_matmul_kernel, fp8_matmul_kernel
from graphopt.kernels.fp8_product import Operand, Product
from graphopt.kernels.fp8_support import Fp8Support
from graphopt.kernels.launch_triton import on_device

# What descriptors and loads of 16 bytes need of addresses, of distances between rows and, for loads, of their length.
ALIGNMENT_BYTES = 16
# Warps of all programs that a multiprocessor is given: two programs of 4 warps hide each other's waiting.
WARPS_OF_A_MULTIPROCESSOR = 8


@dataclass(frozen=True)
class Laid:
    """The codes of an operand as kernels read them, with contiguous, aligned rows.

    ``rows``: [size, K] where ``is_k_last``, else [K, size]; K may be padded with zeros. ``is_copy``: they were copied.
    """

    rows: Tensor
    is_k_last: bool
    is_copy: bool = False


@dataclass(frozen=True)
class Specialization:
    """What a kernel is compiled for, apart from dtypes: the constants of its source."""

    tile: Tile
    a_rows: int
    b_columns: int
    a_is_k_last: bool
    b_is_k_last: bool
    loads_by_tma: bool
    stores_by_tma: bool
    has_bias: bool
    has_block_scales: bool
    promote_every: int | None

    @property
    def kernel(self) -> Any:
        """The Triton function."""
        return fp8_block_matmul_kernel if self.has_block_scales else fp8_matmul_kernel

    def constants(self, num_programs: int) -> dict[str, Any]:
        """The constants by name."""
        constants = {
            "BLOCK_M": self.tile.m,
            "BLOCK_N": self.tile.n,
            "BLOCK_K": self.tile.k,
            "GROUP": GROUP,
            "NUM_PROGRAMS": num_programs,
            "FLATTEN": self.tile.flatten,
            "A_ROWS": self.a_rows,
            "B_COLUMNS": self.b_columns,
            "A_K_LAST": self.a_is_k_last,
            "B_K_LAST": self.b_is_k_last,
            "LOAD_TMA": self.loads_by_tma,
            "STORE_TMA": self.stores_by_tma,
            "HAS_BIAS": self.has_bias,
        }
        return constants if self.has_block_scales else constants | {"PROMOTE_EVERY": self.promote_every}

    def options(self) -> Mapping[str, Any]:
        """How Triton compiles. Fused multiply-adds only make results more exact."""
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": True}


def multiply(product: Product, tile: Tile, support: Fp8Support, *, num_programs: int | None = None) -> Tensor:
    """The result [M,N] of a ``product`` that is not empty. ``num_programs``: None for as many as run at once.

    Operands whose contraction is not contiguous are copied where the matrix unit needs it so, and those that are not
    aligned on 16 bytes everywhere; ``lay`` says which.
    """
    a, b = lay(product.a, support), lay(product.b.transpose, support)
    result = torch.empty(product.m, product.n, dtype=product.dtype, device=product.device)
    chosen = specialize(product, tile, support, a, b)
    if num_programs is None:
        num_programs = multiprocessors(product.device) * max(1, WARPS_OF_A_MULTIPROCESSOR // tile.warps)
    num_tiles = -(-product.m // tile.m) * -(-product.n // tile.n)
    with on_device(product.device):
        chosen.kernel[(min(num_tiles, num_programs),)](
            *_operand_arguments(a, product.a, tile.m, chosen),
            *_operand_arguments(b, product.b.transpose, tile.n, chosen),
            product.a.scale if product.bias is None else product.bias.contiguous(),
            _described(result, (tile.m, tile.n)) if chosen.stores_by_tma else result,
            result.stride(0),
            product.m,
            product.n,
            a.rows.shape[1] if a.is_k_last else product.k,
            **chosen.constants(num_programs),
            **chosen.options(),
        )
    return result


def lay(operand: Operand, support: Fp8Support) -> Laid:
    """The codes [size, K] of ``operand`` as kernels on a device with ``support`` read them."""
    codes = operand.codes
    if _has_aligned_rows(codes):
        return Laid(codes, is_k_last=True)
    if not support.needs_two_layouts and _has_aligned_rows(codes.t()):
        return Laid(codes.t(), is_k_last=False)
    size, k = codes.shape
    padded = codes.new_zeros(size, -(-k // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    padded[:, :k] = codes
    return Laid(padded, is_k_last=True, is_copy=True)


def specialize(product: Product, tile: Tile, support: Fp8Support, a: Laid, b: Laid) -> Specialization:
    """What the kernel of a product is compiled for."""
    family = family_of(support)
    row_bytes = product.n * product.dtype.itemsize
    # The tile to store lies in shared memory beside the pieces in flight: Ada's (and GeForce Blackwell's) does not hold
    # both, and the larger ones do not hold one in float32.
    has_room = support.has_tma and family is not Family.ADA and product.dtype.itemsize == 2
    return Specialization(
        tile=tile,
        a_rows=product.a.grid[0],
        b_columns=product.b.grid[1],
        a_is_k_last=a.is_k_last,
        b_is_k_last=b.is_k_last,
        loads_by_tma=support.has_tma,
        stores_by_tma=has_room and row_bytes % ALIGNMENT_BYTES == 0,
        has_bias=product.bias is not None,
        has_block_scales=product.has_block_scales,
        promote_every=promote_every(family, tile, fast_accumulation=product.fast_accumulation),
    )


def _operand_arguments(laid: Laid, operand: Operand, size: int, chosen: Specialization) -> tuple[Any, ...]:
    """Codes, distance of rows, scales and their strides, as the kernels take them for an operand [size, K]."""
    piece = (size, chosen.tile.k) if laid.is_k_last else (chosen.tile.k, size)
    codes = _described(laid.rows, piece) if chosen.loads_by_tma else laid.rows
    arguments = (codes, laid.rows.stride(0), operand.scale, operand.scale.stride(0))
    if not chosen.has_block_scales:
        return arguments
    return (*arguments, operand.scale.stride(1) if operand.grid[1] else 0)


def _described(rows: Tensor, piece: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], list(piece))


def _has_aligned_rows(matrix: Tensor) -> bool:
    """Whether rows are contiguous and begin and end on 16 bytes. Codes are bytes."""
    lengths = (matrix.data_ptr(), matrix.stride(0), matrix.shape[1])
    return matrix.stride(1) == 1 and all(length % ALIGNMENT_BYTES == 0 for length in lengths)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
