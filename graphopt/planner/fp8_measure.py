"""Measuring the table that FP8 is decided by, on the device that is there: ``graphopt measure-fp8``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import torch

from graphopt.errors import UnsupportedError
from graphopt.kernels.fp8_support import support_on
from graphopt.operators.fp8 import MATMUL, QUANTIZE, QUANTIZE_DELAYED
from graphopt.planner.fp8_devices import class_of_device
from graphopt.planner.fp8_measured import MeasuredProduct, MeasuredTable

Sizes = tuple[int, int, int]
Timer = Callable[[Callable[[], object]], float]

MEASURED_SIZES: tuple[Sizes, ...] = tuple(product((512, 2048, 8192), (1024, 4096, 14336), (1024, 4096, 14336)))
"""Rows, columns and contraction: tokens of small and large micro-batches, widths of models of 0.5 to 70 B parameters.
The largest takes 2 ms in bfloat16 on an H100, and the operands of all fit into 1 GiB."""

_PASS_ELEMENTS = 2**26
_PASS_BYTES = 3
"""An element is read in two bytes and written in one."""
_ROUNDS = 20
_WARM_UPS = 3
_BLOCK = 128

# Grids of the first and second operand of a forward product, [M,K] and [K,N].
_GRIDS = {
    "tensorwise": ((0, 0), (0, 0)),
    "rowwise": ((1, 0), (0, 1)),
    "blockwise": ((1, _BLOCK), (_BLOCK, _BLOCK)),
}


def measure_device(device: torch.device) -> MeasuredTable:
    """The table of a GPU; takes about half a minute. UnsupportedError where there is nothing to measure."""
    if device.type == "cpu":
        raise UnsupportedError(
            "there is nothing to measure on a CPU: FP8 is emulation here, and its costs are not counted; run this on "
            "the GPU that trains, or give a recipe target='H100' to plan with the rates of its data sheet"
        )
    support = support_on(device)
    if not support.has_fp8:
        raise UnsupportedError(f"{support.reason}: there is nothing to measure")
    properties = torch.cuda.get_device_properties(device)
    name = class_of_device(properties.name, (properties.major, properties.minor)).name
    with torch.cuda.device(device):  # events are recorded on the stream of the current device
        return measure_table(
            device, name, device_timer(device), needs_two_layouts=support.needs_two_layouts, sizes=MEASURED_SIZES
        )


def measure_table(
    device: torch.device,
    name: str,
    seconds_of: Timer,
    *,
    needs_two_layouts: bool,
    sizes: Sequence[Sizes],
    pass_elements: int = _PASS_ELEMENTS,
) -> MeasuredTable:
    """The table called ``name`` of products of ``sizes`` on ``device``, as ``seconds_of`` times them."""
    call = seconds_of(_pass_over(device, 1))
    large = seconds_of(_pass_over(device, pass_elements))
    moved = _PASS_BYTES * pass_elements / max(large - call, large / 10)
    products = tuple(_measured(device, shape, seconds_of) for shape in sizes)
    return MeasuredTable(name, needs_two_layouts, moved, call, products)


def device_timer(device: torch.device) -> Timer:
    """A Timer that gives the median of some runs by the device's own clock, or a CPU's."""

    def seconds_of(work: Callable[[], object]) -> float:
        for _ in range(_WARM_UPS):
            work()
        return statistics.median(_run_seconds(device, work) for _ in range(_ROUNDS))

    return seconds_of


def _run_seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def _pass_over(device: torch.device, elements: int) -> Callable[[], object]:
    """A cast to FP8 whose scale is given: one pass."""
    values = torch.randn(1, elements, device=device, dtype=torch.bfloat16)
    scale = torch.ones(1, 1, device=device)
    return lambda: QUANTIZE_DELAYED(values, scale, "e4m3")


def _measured(device: torch.device, sizes: Sizes, seconds_of: Timer) -> MeasuredProduct:
    rows, columns, contraction = sizes
    left = torch.randn(rows, contraction, device=device, dtype=torch.bfloat16)
    right = torch.randn(columns, contraction, device=device, dtype=torch.bfloat16)
    seconds = {name: seconds_of(_fp8_product(left, right, name)) for name in _GRIDS}
    return MeasuredProduct(rows, columns, contraction, bf16=seconds_of(lambda: left @ right.t()), **seconds)


def _fp8_product(left: torch.Tensor, right: torch.Tensor, name: str) -> Callable[[], object]:
    """``left @ right.t()`` of codes, both with the contraction contiguous."""
    left_grid, right_grid = map(list, _GRIDS[name])
    left_codes, left_scale = QUANTIZE(left, "e4m3", left_grid, False)
    right_codes, right_scale = QUANTIZE(right, "e4m3", right_grid[::-1], False)
    codes, scale = right_codes.t(), right_scale.t()
    return lambda: MATMUL(left_codes, left_scale, left_grid, codes, scale, right_grid, None, torch.bfloat16)
