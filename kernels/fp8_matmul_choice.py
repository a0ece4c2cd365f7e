"""Which implementation of an FP8 product runs on a GPU: what was fastest when its class of shapes was first met.

Candidates are the Triton kernels with the tiles of ``fp8_matmul_tiles`` and ``torch._scaled_mm`` where it takes the
product. A choice is kept in ``$GRAPHOPT_CACHE`` (or the user's cache folder), so that a resumed run computes with the
implementation, and so gives the bits, of the run before; delete the file to measure again. ``choices()`` lists them.

While a CUDA graph is recorded nothing can be measured: an unknown class then takes the first tile and keeps no choice.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from graphopt.kernels import fp8_matmul_launch
from graphopt.kernels.cpu_library import cache_folder
from graphopt.kernels.fp8_matmul_launch import lay
from graphopt.kernels.fp8_matmul_tiles import Tile, family_of, form_of, tiles_for
from graphopt.kernels.fp8_product import Product
from graphopt.kernels.fp8_support import Fp8Support
from graphopt.kernels.launch_triton import on_device

# Runs before timing, which compile and fill caches; and runs whose median counts.
WARM_UP_RUNS, TIMED_RUNS = 2, 7
SCALED_MM = "torch._scaled_mm"

Run = Callable[[Product], Tensor]
Timer = Callable[[Callable[[], Any]], float]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What runs for a class of shapes. ``milliseconds`` of each candidate; None: it failed, as ``notes`` says."""

    shapes: str
    implementation: str
    milliseconds: Mapping[str, float | None]
    notes: tuple[str, ...] = ()

    @property
    def best_milliseconds(self) -> float | None:
        """Of the implementation that runs."""
        return self.milliseconds[self.implementation]


def run(product: Product, support: Fp8Support) -> Tensor:
    """The result of a ``product`` that is not empty, on a CUDA device with FP8."""
    shapes = shape_class(product)
    known = _choices(product.device)
    runs = candidates(product, support)
    choice = known.get(shapes)
    if choice is None or choice.implementation not in runs:
        with on_device(product.device):  # what is recorded, and timed, is the stream of the current device
            if torch.cuda.is_current_stream_capturing():
                return next(iter(runs.values()))(product)
            choice = fastest(product, runs, _median_milliseconds, notes=copies(product, support))
        log.info("%s: %s, %s ms", choice.shapes, choice.implementation, choice.best_milliseconds)
        known[shapes] = choice
        store(_file(product.device), known)
    return runs[choice.implementation](product)


def choices(device: torch.device) -> tuple[Choice, ...]:
    """What was chosen on ``device``, a CUDA device, in this process and in those before it."""
    return tuple(_choices(device).values())


def candidates(product: Product, support: Fp8Support) -> dict[str, Run]:
    """Ways to compute ``product`` by name; the first is the one to take where nothing can be measured."""
    found: dict[str, Run] = {
        f"triton {tile}": partial(_by_triton, tile=tile, support=support)
        for tile in tiles_for(product, family_of(support))
    }
    if _scaled_mm_takes(product):
        found[SCALED_MM] = _by_scaled_mm
    return found


def shape_class(product: Product) -> str:
    """The name of the class of ``product``: its form, sides rounded up to powers of two, dtypes, grids and layouts."""
    sides = "x".join(str(1 << (side - 1).bit_length()) for side in (product.m, product.n, product.k))
    a, b = product.a, product.b.transpose
    operands = [
        f"{str(operand.codes.dtype).removeprefix('torch.float8_')}{list(operand.grid)}{_order(operand.codes)}"
        for operand in (a, b)
    ]
    form, dtype = form_of(product.m, product.n, product.k), str(product.dtype).removeprefix("torch.")
    words = [form.value, sides, *operands, dtype]
    if product.bias is not None:
        words.append("bias")
    if product.fast_accumulation:
        words.append("fast")
    return " ".join(words)


def copies(product: Product, support: Fp8Support) -> tuple[str, ...]:
    """What the kernels have to copy before each product, in words."""
    operands = {"a": product.a, "b": product.b.transpose}
    return tuple(
        f"{name} is copied before each product: {support.name} reads the contraction contiguous, on {_ALIGNED}"
        for name, operand in operands.items()
        if lay(operand, support).is_copy
    )


_ALIGNED = f"{fp8_matmul_launch.ALIGNMENT_BYTES} bytes"


def fastest(product: Product, runs: Mapping[str, Run], timer: Timer, *, notes: tuple[str, ...] = ()) -> Choice:
    """The Choice among ``runs`` by ``timer``, which gives milliseconds. RuntimeError if all of them fail."""
    milliseconds: dict[str, float | None] = {}
    for name, candidate in runs.items():
        try:
            milliseconds[name] = timer(partial(candidate, product))
        except Exception as error:  # whatever stops a candidate is its result; the others are still to be measured
            milliseconds[name] = None
            notes = (*notes, f"{name} failed: {' '.join(str(error).split()) or type(error).__name__}")
            log.warning("%s: %s", shape_class(product), notes[-1])
    timed = {name: value for name, value in milliseconds.items() if value is not None}
    if not timed:
        raise RuntimeError(f"no implementation computes the FP8 product {shape_class(product)}: {'; '.join(notes)}")
    return Choice(shape_class(product), min(timed, key=timed.__getitem__), milliseconds, notes)


def store(path: Path, known: Mapping[str, Choice]) -> None:
    """Write ``known`` for later processes; where that is not allowed, they measure again."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps([asdict(choice) for choice in known.values()], indent=1))
        unfinished.replace(path)
    except OSError as error:
        log.warning("choices of FP8 products are not kept: %s", error)


def load(path: Path) -> dict[str, Choice]:
    """What ``store`` wrote, by class; nothing if there is no file, or none of this version."""
    if not path.is_file():
        return {}
    try:
        found = [Choice(**stored | {"notes": tuple(stored["notes"])}) for stored in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        log.warning("choices of FP8 products are measured again, %s holds none: %s", path.name, error)
        return {}
    return {choice.shapes: choice for choice in found}


def _by_triton(product: Product, *, tile: Tile, support: Fp8Support) -> Tensor:
    return fp8_matmul_launch.multiply(product, tile, support)


def _by_scaled_mm(product: Product) -> Tensor:
    """By the vendor's library. It takes a with contiguous rows and b with contiguous columns."""
    return torch.ops.aten._scaled_mm.default(
        product.a.codes.contiguous(),
        product.b.codes.t().contiguous().t(),
        product.a.scale.contiguous(),
        product.b.scale.contiguous(),
        bias=product.bias,
        out_dtype=product.dtype,
        use_fast_accum=product.fast_accumulation,
    )


def _scaled_mm_takes(product: Product) -> bool:
    """Whether ``torch._scaled_mm`` computes ``product`` on CUDA: one scale, or rows by columns into bfloat16; K and N
    multiples of 16. (It has block scales on some devices, in layouts of its own; those are left to Triton.)"""
    grids = (product.a.grid, product.b.grid)
    is_rowwise = grids == ((1, 0), (0, 1)) and product.dtype == torch.bfloat16
    if grids != ((0, 0), (0, 0)) and not is_rowwise:
        return False
    if product.n % 16 or product.k % 16 or product.a.codes.dtype == product.b.codes.dtype == torch.float8_e5m2:
        return False
    return product.bias is None or (product.bias.dtype == product.dtype and product.dtype != torch.float32)


def _order(codes: Tensor) -> str:
    """Which dimension of [size, K] is contiguous, as far as it matters."""
    return "" if codes.stride(1) == 1 else "t"


def device_milliseconds(candidate: Callable[[], Any], rounds: int = TIMED_RUNS) -> tuple[float, ...]:
    """Times of ``candidate`` on the current stream of the current device, after warming up.

    Operands that fit stay in the L2 cache.
    """
    for _ in range(WARM_UP_RUNS):
        candidate()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, stop in events:
        start.record()
        candidate()
        stop.record()
    torch.cuda.synchronize()
    return tuple(start.elapsed_time(stop) for start, stop in events)


def _median_milliseconds(candidate: Callable[[], Any]) -> float:
    return statistics.median(device_milliseconds(candidate))


@cache
def _choices(device: torch.device) -> dict[str, Choice]:
    return load(_file(device))


def _file(device: torch.device) -> Path:
    """The file of this kind of device with these libraries."""
    words = f"{torch.cuda.get_device_name(device)} torch {torch.version.__version__} triton {triton.__version__}"
    name = re.sub(r"[^\w.+]+", "-", words)
    return cache_folder() / f"fp8-matmul-{name}.json"
