"""What a device can do with FP8, told by its compute capability, so that it can be asked where there is no device.

Sources: the PTX ISA (``mma`` and ``wgmma`` take 8-bit operands with the contraction contiguous alone, ``tcgen05.mma``
in both orders), and the cuBLAS manual on FP8 (only "TN" products on 8.9, 9.0 and 12.x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Capability = tuple[int, int]

FIRST_CAPABILITY: Capability = (8, 9)
FIRST_WITH_TMA: Capability = (9, 0)
# Data-center Blackwell, and Thor: their matrix unit reads 8-bit operands in both orders.
MAJORS_WITH_BOTH_ORDERS = (10, 11)


@dataclass(frozen=True)
class Fp8Support:
    """What FP8 products are on one kind of device.

    ``has_fp8``: they exist, in hardware or, where ``is_emulated``, as float32 products of widened codes.
    ``needs_two_layouts``: both operands must have the contraction contiguous (TN), so a value that is contracted along
    one dimension in one product and along the other in another needs its codes in two layouts.
    ``has_tma``: tiles are loaded by tensor descriptors. ``reason``: why there is no FP8, for users; "" where there is.
    """

    name: str
    has_fp8: bool
    is_emulated: bool = False
    needs_two_layouts: bool = False
    has_tma: bool = False
    reason: str = ""


def support_of(capability: Capability | None) -> Fp8Support:
    """The support of an NVIDIA GPU of compute ``capability``; None: a CPU, which emulates."""
    if capability is None:
        return Fp8Support("cpu", has_fp8=True, is_emulated=True)
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < FIRST_CAPABILITY:
        return _nothing(name, f"no FP8 here: {name} has no FP8 matrix unit, compute capability 8.9 or newer needed")
    return Fp8Support(
        name,
        has_fp8=True,
        needs_two_layouts=capability[0] not in MAJORS_WITH_BOTH_ORDERS,
        has_tma=capability >= FIRST_WITH_TMA,
    )


def support_on(device: torch.device) -> Fp8Support:
    """The support of ``device``, which must exist where it is a GPU."""
    if device.type == "cpu":
        return support_of(None)
    if device.type != "cuda":
        return _nothing(device.type, f"no FP8 here: {device.type} devices are not supported, use cuda or cpu")
    if torch.version.hip is not None:
        return _nothing("hip", "no FP8 here: on ROCm it has not been built or tested, use an NVIDIA GPU or bf16")
    return support_of(torch.cuda.get_device_capability(device))


def _nothing(name: str, reason: str) -> Fp8Support:
    return Fp8Support(name, has_fp8=False, reason=reason)
