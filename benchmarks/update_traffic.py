"""The block-INT8 update against the bytes that it must move: how far its time is from what memory allows.

``python -m benchmarks.update_traffic [--rounds N] [--tiny]``

An 8-bit AdamW reads parameter and gradient, reads and writes two codes and writes the parameter; each block of 256 has
two float32 scales. That is the floor of bitsandbytes' kernel as well. These bytes over those that a plain copy moves in
a second are the least time. Without a GPU sizes are tiny: rows prove that the benchmark runs, and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.cells import ratio_cell, seconds_cell
from benchmarks.command import Results, Rounds, console, run_command
from benchmarks.device import copy_bytes_per_second, device_slug, measured_device, seconds_of
from benchmarks.eight_bit_peers import BITSANDBYTES, adamw_8bit
from benchmarks.machine import this_machine
from benchmarks.rows import RESULTS, Row, Subject, store_rows
from benchmarks.steps import first_line
from graphopt.operators.block_update import block_adam_list_

OWN, FUSED, PUBLIC = "graphopt block_adam_list_", "torch AdamW, fused, float32 state", f"{BITSANDBYTES} AdamW8bit"
BLOCK = 256
# Tensors, rows, columns: a quarter of a billion parameters, of which no cache holds a part; and next to nothing.
SHAPE, TINY_SHAPE = (16, 4096, 4096), (4, 64, 256)
_COPY_BYTES, _TINY_COPY_BYTES = 2**31, 2**16
_DEFAULT_ROUNDS = 11
_PARAMETER_SCALE, _GRADIENT_SCALE = 0.02, 0.001
_LR, _WEIGHT_DECAY, _BETAS, _EPS = 1e-3, 1e-2, (0.9, 0.999), 1e-8

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class TrafficFigures:
    """One way to update. ``traffic_bytes`` must move at least, with ``copy_rate`` bytes in a second."""

    name: str
    dtype: str
    device: str
    traffic_bytes: int
    copy_rate: float
    seconds: tuple[float, ...] = ()
    note: str = ""

    @property
    def floor_seconds(self) -> float:
        """The least time that memory allows."""
        return self.traffic_bytes / self.copy_rate

    @property
    def median_seconds(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.seconds) if self.seconds else None


def traffic_bytes(shape: Shape, dtype: torch.dtype, state_bytes: float) -> int:
    """Parameter read and written, gradient read, ``state_bytes`` of state for each parameter read and written."""
    count, rows, columns = shape
    return round(count * rows * columns * (3 * dtype.itemsize + 2 * state_bytes))


def measure_traffic(shape: Shape, rounds: int, device: torch.device, copied: int) -> Iterator[Row[TrafficFigures]]:
    """The rows of float32 and bfloat16 parameters; whatever stops a contender becomes its note."""
    rate = copy_bytes_per_second(device, copied, rounds)
    machine, count = this_machine(), shape[0] * shape[1] * shape[2]
    eight_bit = 2 * (1 + 4 / BLOCK)
    for dtype in (torch.float32, torch.bfloat16):
        # torch keeps the moments in the dtype of the parameter.
        states = {OWN: eight_bit, PUBLIC: eight_bit, FUSED: 2.0 * dtype.itemsize}
        for name, make in _MAKERS.items():
            text = str(dtype).removeprefix("torch.")
            figures = TrafficFigures(name, text, device_slug(device), traffic_bytes(shape, dtype, states[name]), rate)
            subject = Subject("x".join(map(str, shape)), count, f"{text} parameters and gradients", ())
            try:
                figures = replace(figures, seconds=seconds_of(make(*_tensors(shape, dtype, device)), rounds, device))
            except Exception as error:  # a failure is the contender's result; the others are still to be measured
                figures = replace(figures, note=first_line(error))
            yield Row(subject, machine, figures)


def _tensors(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    count, *size = shape
    generator = torch.Generator(device).manual_seed(0)
    parameters, gradients = (
        [(torch.randn(size, generator=generator, device=device) * scale).to(dtype) for _ in range(count)]
        for scale in (_PARAMETER_SCALE, _GRADIENT_SCALE)
    )
    return parameters, gradients


def _own(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], Any]:
    codes = [[torch.zeros_like(tensor, dtype=dtype) for tensor in parameters] for dtype in (torch.int8, torch.uint8)]
    scales = [[torch.zeros(-(-tensor.numel() // BLOCK), device=tensor.device) for tensor in parameters] for _ in "12"]
    tensors = (parameters, gradients, codes[0], scales[0], codes[1], scales[1])
    seeds, offsets = list(range(len(parameters))), [0] * len(parameters)
    numbers = (_LR, _WEIGHT_DECAY, *_BETAS, _EPS, 1.0)
    return partial(block_adam_list_, *tensors, None, *numbers, BLOCK, "companded", True, True, False, seeds, offsets)


def _torch_optimizer(
    make: Callable[..., torch.optim.Optimizer], parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Callable[[], Any]:
    trained = [torch.nn.Parameter(parameter) for parameter in parameters]
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    return make(trained, lr=_LR, weight_decay=_WEIGHT_DECAY).step


def _fused(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], Any]:
    return _torch_optimizer(partial(torch.optim.AdamW, fused=True), parameters, gradients)


def _public(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], Any]:
    return _torch_optimizer(adamw_8bit(BITSANDBYTES), parameters, gradients)


_MAKERS = {OWN: _own, PUBLIC: _public, FUSED: _fused}


def traffic_table(rows: Sequence[Row[TrafficFigures]]) -> Table:
    """One line for each row."""
    table = Table("update", "parameters")
    for heading in ("floor", "median", "of the floor"):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for row in rows:
        figures = row.figures
        median = figures.median_seconds
        cells = (seconds_cell(figures.floor_seconds), seconds_cell(median), ratio_cell(median, figures.floor_seconds))
        table.add_row(figures.name, figures.dtype, *cells, figures.note)
    return table


def main(
    rounds: Rounds = _DEFAULT_ROUNDS,
    tiny: Annotated[bool, typer.Option(help="Tiny sizes on a GPU too.")] = False,
    results: Results = RESULTS,
) -> None:
    """Measure block-INT8 updates against the floor that memory sets."""
    device = measured_device()
    is_tiny = tiny or device.type == "cpu"
    shape, copied = (TINY_SHAPE, _TINY_COPY_BYTES) if is_tiny else (SHAPE, _COPY_BYTES)
    path = results / f"update-traffic-{device_slug(device)}.jsonl"
    console().print(traffic_table(tuple(store_rows(path, measure_traffic(shape, rounds, device, copied)))))


if __name__ == "__main__":
    run_command(main)
