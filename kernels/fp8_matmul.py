"""Products of FP8 matrices: by the fastest implementation there is on the device, and which one that is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphopt.kernels.fp8_matmul_cpu import emulate
from graphopt.kernels.fp8_product import Product, check_product
from graphopt.kernels.fp8_support import Fp8Support, support_on

if TYPE_CHECKING:
    from graphopt.kernels.fp8_matmul_choice import Choice


def matmul(product: Product) -> Tensor:
    """The result [M,N], contiguous; see ``fp8_product``. ValueError if the product is none, or the device has no FP8.

    A CPU always emulates, so its bits never depend on what was measured. A GPU takes what was fastest when a product of
    this class of shapes was first computed (``fp8_matmul_choice``).
    """
    check_product(product)
    support = support_on(product.device)
    if not support.has_fp8:
        raise ValueError(support.reason)
    if 0 in (product.m, product.n, product.k):
        return _empty_sum(product)
    if support.is_emulated:
        return emulate(product)
    from graphopt.kernels import fp8_matmul_choice  # Triton exists on Linux alone

    return fp8_matmul_choice.run(product, support)


def matmul_path(support: Fp8Support) -> str:
    """How products are computed on a device with ``support``, in words."""
    if not support.has_fp8:
        return support.reason
    if support.is_emulated:
        return "emulated on the CPU: codes widened to float32, float32 products, the numbers of FP8 without its speed"
    return f"Triton or torch._scaled_mm on {support.name}, whichever was faster for each class of shapes"


def choices_on(device: torch.device) -> tuple[Choice, ...]:
    """What was chosen on ``device`` for each class of shapes, with milliseconds of all candidates; none on a CPU."""
    if device.type != "cuda":
        return ()
    from graphopt.kernels import fp8_matmul_choice  # Triton exists on Linux alone

    return fp8_matmul_choice.choices(device)


def _empty_sum(product: Product) -> Tensor:
    """The result where there is nothing to sum: the bias."""
    result = torch.zeros(product.m, product.n, dtype=product.dtype, device=product.device)
    return result if product.bias is None else result.add_(product.bias)
