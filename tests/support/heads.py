"""Models that end in a linear layer and a loss, for passes that treat the two together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphopt.build import bind_batch
from graphopt.capture.export import OutputRequest, capture_program
from graphopt.ir.program import Program

ROWS, LENGTH, FEATURES, CLASSES = 2, 6, 8, 50

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class HeadModel(nn.Module):
    """``hidden [2,6,8] -> logits [2,6,50] -> loss(logits, y)``; ``extra`` makes more outputs of the logits."""

    def __init__(self, loss: Loss, *, bias: bool = False, extra: Callable[[torch.Tensor], dict] = lambda logits: {}):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        self.loss, self.extra = loss, extra

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": self.loss(logits, y), **self.extra(logits)}


def head_batch(*, ignored: int = 2) -> dict[str, torch.Tensor]:
    """Hidden rows, and labels of which the last ``ignored`` of each sequence count for nothing."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    y[:, LENGTH - ignored :] = -100
    return {"x": torch.randn(ROWS, LENGTH, FEATURES, generator=generator), "y": y}


def forward_program(model: nn.Module, batch: dict[str, torch.Tensor], outputs: tuple[str, ...] = ("loss",)) -> Program:
    """The captured forward before any pass."""
    return capture_program(model, bind_batch(model, batch), OutputRequest(outputs)).program
