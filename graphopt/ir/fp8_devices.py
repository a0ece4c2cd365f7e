"""Which layouts of FP8 codes the products of a device read."""

from __future__ import annotations

import torch

from graphopt.kernels.fp8_support import support_on


def reads_both_orders(device: torch.device) -> bool:
    """Whether FP8 products on ``device`` read operands in either order; else only with the contraction contiguous."""
    return not support_on(device).needs_two_layouts
