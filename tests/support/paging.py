"""Models and steps for tests of paged state."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.build import training_program
from graphopt.capture.update import UpdateRequest, append_update
from graphopt.capture.update_bucket import make_bucket
from graphopt.execute.executable import Executable, build_executable
from graphopt.execute.paging.rules import install_rules
from graphopt.execute.step import TrainStep
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import OutputKind
from graphopt.optim import Optimizer
from graphopt.pipeline.default import default_pipeline

# ``graphopt.capture`` is a function too, which hides the package of that name.
RANGE_UPDATE = sys.modules["graphopt.capture.range_update"]


class Tensors(nn.Module):
    """Parameters of the given shapes, each with a gradient of its own that changes from step to step."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tensors = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        terms = [((tensor * x).sin() * tensor).float().sum() for tensor in self.tensors]
        return {"loss": torch.stack(terms).sum()}


def compiled(model: nn.Module, optimizer: Optimizer, **options: Any) -> TrainStep:
    """A step of ``model`` on plain operators: a compiler that fuses an update would round it otherwise."""
    return graphopt.compile(model, outputs=["loss"], optimizer=optimizer, backend="aten", **options)


def pair(model: nn.Module, optimizer: type[Optimizer], *, paging: dict[str, Any], step: dict[str, Any], **kwargs: Any):
    """Two copies of ``model`` with their steps: state in ordinary memory, and paged."""
    plain, paged = copy.deepcopy(model), copy.deepcopy(model)
    plain_step = compiled(plain, optimizer(**kwargs), **step)
    return (plain, plain_step), (paged, compiled(paged, optimizer(**kwargs, paged=True, **paging), **step))


def assert_same_parameters(model: nn.Module, other: nn.Module, what: Any = "") -> None:
    """Bit for bit."""
    for (name, value), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(value, expected), (what, name)


def assert_same_state(step: TrainStep, other: TrainStep) -> None:
    """Bit for bit, names and dtypes included."""
    mine, theirs = step.state_dict()["state"], other.state_dict()["state"]
    assert list(mine) == list(theirs)
    for name, values in mine.items():
        assert list(values) == list(theirs[name]), name
        for key, value in values.items():
            expected = theirs[name][key]
            if not isinstance(value, torch.Tensor):
                assert value == expected, (name, key)
                continue
            assert (value.dtype, value.shape, value.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(value, expected), (name, key)


def in_small_ranges(monkeypatch: pytest.MonkeyPatch, num_elements: int = 256) -> None:
    """Ranges of about ``num_elements``, so that small parameters have many."""
    monkeypatch.setattr(RANGE_UPDATE, "RANGE_ELEMENTS", num_elements)


def paged_step_program(model: nn.Module, batch: Any, optimizer: Optimizer, *, clip: bool = False) -> Program:
    """Forward, backward and update of paged state, before any step pass; what updates ranges is installed."""
    joint = training_program(model, batch, outputs=["loss"])
    names = tuple(output.name for _, output in joint.signature.outputs_of(OutputKind.GRAD))
    bucket = make_bucket(optimizer, optimizer.options(), name="0", parameters=names, is_paged=True)
    program = append_update(joint, UpdateRequest(optimizer, (bucket,), clip=clip))

    def build(rule: Program) -> Executable:
        return build_executable(default_pipeline(Stage.STEP).run(rule), title="range update")

    install_rules(program, build)
    return program
