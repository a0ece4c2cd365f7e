"""What is known of devices that train in FP8: peak rates from data sheets, and what of them is reached.

Times made of these are estimates. ``graphopt measure-fp8`` measures a device, and then its table counts instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from graphopt.errors import UnsupportedError
from graphopt.kernels.fp8_support import Capability, Fp8Support, support_of

_TERA, _GIGA = 1e12, 1e9

PRODUCT_EFFICIENCY = 0.70
"""Of the peak that a large product reaches, in bfloat16 and in FP8 with one scale for each operand. Transformer
Engine's figures for an H200 NVL (835 and 1,671 TFLOP/s) are 0.72 and 0.68: 19.2 TFLOP of a layer's products in 32.0 ms
in bfloat16, in 16.8 ms in FP8 with operands quantized before."""

ROW_SCALES_EFFICIENCY = 0.83
"""Of that, with a scale for each row: what is left of torchao's +10 % for Llama 3 8B on H100 (6,150 to 6,768 tokens/s)
when its passes over operands are taken off (0.198 s saved where half of the products' 0.50 s would be 0.25 s)."""

BLOCK_SCALES_EFFICIENCY = 0.83
"""Of that, with a scale for 128 elements: sums are added to a second accumulator every 128. Assumed as for rows."""

BANDWIDTH_EFFICIENCY = 0.70
"""Of the memory's peak that a quantizing pass reaches. Transformer Engine's overhead on the same H200 (3.5 ms for two
passes, 2.2 ms for one) is 0.45 of the peak, torchao's kernels reach 0.85 to 0.94 of what a copy does."""

CALL_SECONDS = 4e-6
"""Of any kernel, beside its work: 2 us to start (torchao's roofline), as much for the first and the last tile."""


@dataclass(frozen=True)
class DeviceClass:
    """``capability``: compute capability; dense peak rates in FLOP/s, with float32 sums, and bytes/s; no ``fp8_flops``
    where there is no FP8. The other fields are the fractions above. ``waits_for_memory``: whether a product takes as
    long as its operands and result take to move. ``like``: the class whose rates are assumed for a device that is not
    known.
    """

    name: str
    capability: Capability
    bf16_flops: float
    fp8_flops: float
    bandwidth: float
    product_efficiency: float = PRODUCT_EFFICIENCY
    row_scales_efficiency: float = ROW_SCALES_EFFICIENCY
    block_scales_efficiency: float = BLOCK_SCALES_EFFICIENCY
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    call_seconds: float = CALL_SECONDS
    waits_for_memory: bool = True
    like: str = ""

    @property
    def support(self) -> Fp8Support:
        """What FP8 products are on it."""
        return support_of(self.capability)

    def ideal(self) -> DeviceClass:
        """A device that reaches its peaks, at no cost of a call, and whose products are arithmetic alone."""
        return replace(
            self,
            name=f"ideal {self.name}",
            product_efficiency=1.0,
            row_scales_efficiency=1.0,
            block_scales_efficiency=1.0,
            bandwidth_efficiency=1.0,
            call_seconds=0.0,
            waits_for_memory=False,
        )


def _device(name: str, capability: Capability, bf16_tflops: float, fp8_tflops: float, gigabytes: float) -> DeviceClass:
    return DeviceClass(name, capability, bf16_tflops * _TERA, fp8_tflops * _TERA, gigabytes * _GIGA)


# Dense rates of NVIDIA's data sheets, without sparsity; of the RTX cards those with float32 sums, which are half of the
# FP8 rate that is advertised.
DEVICE_CLASSES = (
    _device("A100", (8, 0), 312, 0, 2039),
    _device("L4", (8, 9), 121, 242, 300),
    _device("L40S", (8, 9), 362, 733, 864),
    _device("RTX 4090", (8, 9), 165, 330, 1008),
    _device("H100", (9, 0), 989, 1979, 3350),
    _device("H100 PCIe", (9, 0), 756, 1513, 2000),
    _device("H200", (9, 0), 989, 1979, 4800),
    _device("H200 NVL", (9, 0), 835, 1671, 4800),
    _device("B200", (10, 0), 2250, 4500, 8000),
    _device("RTX 5090", (12, 0), 209.5, 419, 1792),
)


_SAYS_NOTHING = re.compile(r"nvidia|tesla|geforce|sxm\d*|hbm\w*|\d+gb")
"""Words in a GPU's name that tell no other device from the one that its class is of."""


def device_class(target: str) -> DeviceClass:
    """The class that a user's ``target`` names, whatever its case, blanks and dashes, or as its driver names it;
    UnsupportedError for no class.
    """
    telling = [word for word in re.findall(r"[a-z0-9]+", target.lower()) if not _SAYS_NOTHING.fullmatch(word)]
    wanted = "".join(telling)
    found = next((item for item in DEVICE_CLASSES if wanted in (_plain(item.name), _plain(item.name, "rtx"))), None)
    if found is None:
        raise UnsupportedError(
            f"target expects one of {', '.join(item.name for item in DEVICE_CLASSES)}, came {target!r}; leave it out "
            "for the device that runs"
        )
    return found


def class_of_device(device_name: str, capability: Capability) -> DeviceClass:
    """The class of a GPU by the name that its driver gives, word by word; else, as for an "H100 NVL" or a part of a
    GPU, a class under that name with the rates of the one that it is named after, of one of its compute capability, or
    of the nearest older one.
    """
    words = _words(device_name)
    named = max((item for item in DEVICE_CLASSES if _words(item.name) <= words), key=_num_words, default=None)
    if named is not None:
        more = {word for word in words - _words(named.name) if not _SAYS_NOTHING.fullmatch(word)}
        return replace(named, name=device_name, like=named.name) if more else named
    older = [item for item in DEVICE_CLASSES if item.capability <= capability] or [DEVICE_CLASSES[0]]
    nearest = max(older, key=lambda item: item.capability)
    return replace(nearest, name=device_name, capability=capability, like=nearest.name)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def _num_words(device: DeviceClass) -> int:
    return len(_words(device.name))


def _plain(name: str, without: str = "") -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix(without)
