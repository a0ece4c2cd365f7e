"""Adam with 8-bit state, one step at a time: ours, and bitsandbytes' from its sources, beside torch's in float32.

bitsandbytes 0.50 (https://github.com/bitsandbytes-foundation/bitsandbytes): ``functional.create_dynamic_map``, and
``_optimizer_update_8bit_blockwise_cpu`` in ``backends/cpu/ops.py``. Its protocol (``test_optimizer8bit`` in
``tests/test_optim.py``): 50 steps on gradients of ``0.01 * randn``; after each, parameters and moments of the float32
run are set to those of the 8-bit one, so that what is compared is one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import graphopt.operators.block_update  # noqa: F401  registers the operators
from graphopt.kernels.block_maps import decode_signed, decode_unsigned

BLOCK = 256
LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
STEPS = 50


class EightBitAdamW(Protocol):
    """AdamW of one parameter."""

    def update(self, parameter: Tensor, gradient: Tensor, step: int) -> None:
        """One step, in place."""

    def moments(self) -> tuple[Tensor, Tensor]:
        """Both, decoded, f32 of the parameter's shape."""


class OwnAdamW:
    """The operator. ``shape`` has a multiple of 256 elements."""

    def __init__(self, shape: tuple[int, ...], *, weight_decay: float, map: str, stochastic: bool) -> None:
        self.codes = (torch.zeros(shape, dtype=torch.int8), torch.zeros(shape, dtype=torch.uint8))
        self.scales = tuple(torch.zeros(math.prod(shape) // BLOCK) for _ in range(2))
        self.weight_decay, self.map, self.stochastic = weight_decay, map, stochastic

    def update(self, parameter: Tensor, gradient: Tensor, step: int) -> None:
        state = (self.codes[0], self.scales[0], self.codes[1], self.scales[1])
        numbers = (LR, self.weight_decay, *BETAS, EPS, float(step))
        flags = (True, self.stochastic, False)
        torch.ops.graphopt.block_adam_(parameter, gradient, *state, None, *numbers, BLOCK, self.map, *flags, 0, 0)

    def moments(self) -> tuple[Tensor, Tensor]:
        shape = self.codes[0].shape
        rows = [codes.view(-1, BLOCK) for codes in self.codes]
        first = decode_signed(rows[0], self.scales[0], self.map)
        second = decode_unsigned(rows[1], self.scales[1], self.map)
        return first.view(shape), second.view(shape)


class BitsandbytesAdamW:
    """Its formula on its dynamic map; the codes are positions in the map."""

    def __init__(self, shape: tuple[int, ...], *, weight_decay: float) -> None:
        self.shape, self.weight_decay = shape, weight_decay
        self.maps = (dynamic_map(is_signed=True), dynamic_map(is_signed=False))
        zeros = torch.zeros(math.prod(shape) // BLOCK, BLOCK)
        self.states = [quantized(zeros, values) for values in self.maps]

    def update(self, parameter: Tensor, gradient: Tensor, step: int) -> None:
        mean, square = self.moments()
        wide, slope = parameter.float(), gradient.float()
        mean.mul_(BETAS[0]).add_(slope, alpha=1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(slope, slope, value=1 - BETAS[1])
        denominator = (square.sqrt() / math.sqrt(1 - BETAS[1] ** step)).add_(EPS)
        wide = wide * (1 - LR * self.weight_decay)
        parameter.copy_(wide.addcdiv_(mean, denominator, value=-LR / (1 - BETAS[0] ** step)))
        moments = (mean.view(-1, BLOCK), square.view(-1, BLOCK))
        self.states = [quantized(*pair) for pair in zip(moments, self.maps, strict=True)]

    def moments(self) -> tuple[Tensor, Tensor]:
        pairs = zip(self.states, self.maps, strict=True)
        first, second = ((values[codes] * scales[:, None]).view(self.shape) for (codes, scales), values in pairs)
        return first, second


class PackageAdamW:
    """bitsandbytes itself, where it is installed."""

    def __init__(self, *, weight_decay: float) -> None:
        self.trained = torch.nn.Parameter(torch.zeros(0))
        self.make = lambda: _package().AdamW8bit([self.trained], lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay)
        self.optimizer: torch.optim.Optimizer | None = None

    def update(self, parameter: Tensor, gradient: Tensor, step: int) -> None:
        self.trained.data, self.trained.grad = parameter, gradient
        self.optimizer = self.optimizer or self.make()
        self.optimizer.step()

    def moments(self) -> tuple[Tensor, Tensor]:
        assert self.optimizer is not None, "a step was taken"
        state = self.optimizer.state[self.trained]
        first, second = (
            (state[f"qmap{i}"][state[f"state{i}"].long()].view(-1, BLOCK) * state[f"absmax{i}"].view(-1, 1)).view(
                self.trained.shape
            )
            for i in (1, 2)
        )
        return first, second


def _package() -> Any:
    import bitsandbytes

    return bitsandbytes.optim


def dynamic_map(*, is_signed: bool) -> Tensor:
    """f32[256], ascending: for 8 bits, of which 7 may be the exponent."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1 if is_signed else 2 ** (i + 1) + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        values += (10 ** (i - 6) * means).tolist()
        if is_signed:
            values += (-(10 ** (i - 6)) * means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def quantized(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the nearest of ``table`` i64[blocks, 256] and scales f32[blocks] of ``values`` f32[blocks, 256]."""
    scales = values.abs().amax(dim=1)
    ratio = values / scales.where(scales > 0, 1.0)[:, None]
    return torch.bucketize(ratio, (table[:-1] + table[1:]) / 2), scales


@dataclass(frozen=True)
class StepErrors:
    """Means over all elements and steps: of the parameters' difference and of that over their magnitude; and of what
    encoding the moments would change in a step taken from them, over the mean step."""

    parameter: float
    relative: float
    direction: float


def step_errors(
    own: EightBitAdamW, shape: tuple[int, ...], dtype: torch.dtype, *, weight_decay: float, steps: int = STEPS
) -> StepErrors:
    """The errors by bitsandbytes' protocol. The float32 run starts each step from the 8-bit one's parameters (dtype
    ``dtype``) and moments."""
    generator = torch.Generator().manual_seed(0)
    parameter = (torch.randn(shape, generator=generator) * 0.1).to(dtype)
    exact = torch.nn.Parameter(parameter.float().clone())
    reference = torch.optim.AdamW([exact], lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay)
    sums = torch.zeros(3, dtype=torch.float64)
    for step in range(1, steps + 1):
        gradient = torch.randn(shape, generator=generator).mul_(0.01).to(dtype)
        exact.grad = gradient.float()
        reference.step()
        own.update(parameter, gradient, step)
        state = reference.state[exact]
        with torch.no_grad():
            error = (exact - parameter.float()).abs()
            kept, fresh = _direction(*own.moments()), _direction(state["exp_avg"], state["exp_avg_sq"])
            direction = (kept - fresh).abs().mean() / fresh.abs().mean()
            sums += torch.stack([error.mean(), (error / (exact.abs() + 1e-9)).mean(), direction])
            exact.copy_(parameter.float())
            for name, moment in zip(("exp_avg", "exp_avg_sq"), own.moments(), strict=True):
                state[name].copy_(moment)
    return StepErrors(*(sums / steps).tolist())


def _direction(mean: Tensor, square: Tensor) -> Tensor:
    return mean / (square.sqrt() + EPS)
