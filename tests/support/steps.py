"""Whole training steps for tests, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphopt.build import training_program
from graphopt.capture.update import UpdateRequest, append_update
from graphopt.capture.update_bucket import make_bucket
from graphopt.execute.executable import Executable, build_executable
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import OutputKind
from graphopt.optim import AdamW, Optimizer
from graphopt.pipeline.default import default_pipeline


class TwoLayers(nn.Module):
    """16 -> 32 -> 4 with a mean square loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"logits": logits, "loss": (logits - target).square().mean()}


def two_layers() -> tuple[TwoLayers, dict[str, torch.Tensor]]:
    """A model and its batch of 8."""
    torch.manual_seed(0)
    return TwoLayers(), {"x": torch.randn(8, 16), "target": torch.randn(8, 4)}


def training_program_of(model: nn.Module, batch: Mapping[str, Any]) -> Program:
    """The joint program of ``model`` after the joint passes, its loss alone asked for."""
    return default_pipeline(Stage.JOINT).run(training_program(model, batch, outputs=["loss"]))


def step_program(
    model: nn.Module, batch: Mapping[str, Any], *, optimizer: Optimizer | None = None, clip: bool = True
) -> Program:
    """Forward, backward, clipping (by default) and update (by default AdamW), before any step pass."""
    optimizer = optimizer or AdamW(lr=1e-3)
    joint = training_program(model, batch, outputs=["loss"])
    names = tuple(output.name for _, output in joint.signature.outputs_of(OutputKind.GRAD))
    bucket = make_bucket(optimizer, optimizer.options(), name="0", parameters=names)
    return append_update(joint, UpdateRequest(optimizer, (bucket,), clip=clip))


def step_executable(*, optimizer: Optimizer | None = None, in_place: bool = True) -> Executable:
    """The compiled step of ``two_layers``."""
    program = step_program(*two_layers(), optimizer=optimizer)
    return build_executable(default_pipeline(Stage.STEP).run(program) if in_place else program, title="test")
