"""Ways to update parameters whose gradients are given: torch, public 8-bit optimizers, graphopt's operator and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import graphopt
import graphopt.operators.block_update
from benchmarks.eight_bit_peers import BITSANDBYTES, TORCHAO, MakeOptimizer, adamw_8bit
from benchmarks.measure import optimizer_tensors
from graphopt.optim import AdamW, AdamW8bit, Optimizer
from graphopt.options import Accumulate

FUSED, LOOP = "torch AdamW, fused", "torch AdamW, loop"
TORCHAO_8BIT, BITSANDBYTES_8BIT = f"{TORCHAO} AdamW8bit", f"{BITSANDBYTES} AdamW8bit"
OWN_OPERATOR, OWN_LARGE_BLOCK = "graphopt AdamW8bit, operator", "graphopt AdamW8bit, operator, block 2048"
OWN_COMPILED = "graphopt AdamW8bit, compiled"
OWN_BFLOAT16, OWN_FLOAT32 = "graphopt AdamW, bf16 state, compiled", "graphopt AdamW, float32 state, compiled"

BLOCK, LARGE_BLOCK = 256, 2048
_LR, _BETAS, _EPS, _WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Update:
    """``run()`` is one update; ``prepare()`` makes what it consumes and is not timed; ``state()``: the tensors kept."""

    run: Callable[[], object]
    state: Callable[[], Iterable[Tensor]]
    prepare: Callable[[], object] = _nothing


MakeUpdate = Callable[[Sequence[Tensor], Sequence[Tensor]], Update]


def update_makers() -> Mapping[str, MakeUpdate]:
    """By name, how to make each from parameters, which it may keep and write, and gradients of the same shapes."""
    return {
        FUSED: partial(_torch_update, partial(torch.optim.AdamW, lr=_LR, weight_decay=_WEIGHT_DECAY, fused=True)),
        LOOP: partial(_torch_update, partial(torch.optim.AdamW, lr=_LR, weight_decay=_WEIGHT_DECAY, foreach=False)),
        TORCHAO_8BIT: partial(_package_update, TORCHAO),
        BITSANDBYTES_8BIT: partial(_package_update, BITSANDBYTES),
        OWN_OPERATOR: partial(_operator_update, BLOCK),
        OWN_LARGE_BLOCK: partial(_operator_update, LARGE_BLOCK),
        OWN_COMPILED: partial(_compiled_update, AdamW8bit(lr=_LR, weight_decay=_WEIGHT_DECAY)),
        OWN_BFLOAT16: partial(_compiled_update, AdamW(lr=_LR, weight_decay=_WEIGHT_DECAY, state="bf16")),
        OWN_FLOAT32: partial(_compiled_update, AdamW(lr=_LR, weight_decay=_WEIGHT_DECAY)),
    }


def _torch_update(make: MakeOptimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Update:
    trained = [nn.Parameter(parameter) for parameter in parameters]
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    optimizer = make(trained)
    return Update(optimizer.step, lambda: optimizer_tensors(optimizer))


def _package_update(package: str, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Update:
    make = partial(adamw_8bit(package), lr=_LR, weight_decay=_WEIGHT_DECAY)
    return _torch_update(make, parameters, gradients)


def _operator_update(block: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Update:
    """All parameters in one call, in place."""
    signed = [torch.zeros_like(parameter, dtype=torch.int8) for parameter in parameters]
    unsigned = [torch.zeros_like(parameter, dtype=torch.uint8) for parameter in parameters]
    scales = [[torch.zeros(-(-parameter.numel() // block)) for parameter in parameters] for _ in range(2)]
    tensors = (parameters, gradients, signed, scales[0], unsigned, scales[1])
    seeds, offsets = list(range(len(parameters))), [0] * len(parameters)
    step = 0.0

    def run() -> None:
        nonlocal step
        step += 1
        numbers = (_LR, _WEIGHT_DECAY, *_BETAS, _EPS, step)
        torch.ops.graphopt.block_adam_list_(
            *tensors, None, *numbers, block, "companded", True, True, False, seeds, offsets
        )

    return Update(run, lambda: (*signed, *unsigned, *scales[0], *scales[1]))


class _Product(nn.Module):
    """Its loss is the sum of parameters times gradients, so that those are its gradients."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)

    def forward(self, *gradients: Tensor) -> dict[str, Tensor]:
        """The ``loss``."""
        products = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        return {"loss": torch.stack(products).sum()}


def _compiled_update(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Update:
    """The update that ends a window of accumulation: it is compiled apart from forward and backward."""
    window = Accumulate(2, reduction="sum")
    step = graphopt.compile(
        _Product(parameters), outputs=["loss"], optimizer=optimizer, accumulate=window, backend="aten"
    )
    return Update(step.flush, lambda: optimizer_tensors(step.optimizer), prepare=lambda: step(*gradients))
