"""skip-gradient-casts: updates by blocks read gradients in the type in which they were computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphopt.capture.update import UpdateRequest, append_update
from graphopt.capture.update_bucket import make_bucket
from graphopt.ir.spec import OutputKind
from graphopt.optim import AdamW, AdamW8bit, Lion8bit
from graphopt.optim.state import BlockState
from graphopt.passes.skip_gradient_casts import SkipGradientCasts
from tests.support.graphs import run_pass
from tests.support.steps import training_program_of

aten = torch.ops.aten
WIDTH, LAYERS = 64, 2


class Layers(nn.Module):
    """Linear layers in ``low`` over float32 weights, or over weights in ``stored``."""

    def __init__(self, low=torch.bfloat16, stored=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=stored) for _ in range(LAYERS))
        self.low = low

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.linear(x.to(self.low), layer.weight.to(self.low)).tanh()
        return {"loss": x.float().square().mean()}


def program(optimizer=None, *, clip=False, by_blocks=True, **options):
    """Forward, backward and update, all parameters with state by blocks, before any step pass."""
    optimizer = optimizer or AdamW8bit(lr=1e-3)
    joint = training_program_of(Layers(**options), {"x": torch.randn(8, WIDTH)})
    names = tuple(output.name for _, output in joint.signature.outputs_of(OutputKind.GRAD))
    state_format = BlockState() if by_blocks else None
    bucket = make_bucket(optimizer, optimizer.options(), name="0", parameters=names, state_format=state_format)
    return append_update(joint, UpdateRequest(optimizer, (bucket,), clip=clip))


def gradient_types(program):
    """The dtypes of what updates by blocks read as gradients."""
    return [program.spec(node.args[1]).dtype for node in program.ops() if "block_" in str(node.target)]


@pytest.mark.parametrize("optimizer", [AdamW8bit(lr=1e-3), Lion8bit(lr=1e-3)])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_update_reads_what_was_computed(optimizer, low):
    before = program(optimizer, low=low)
    assert gradient_types(before) == [torch.float32] * LAYERS
    after, record = run_pass(SkipGradientCasts(), before)
    assert gradient_types(after) == [low] * LAYERS and record.changes == LAYERS
    assert len(after.ops()) == len(before.ops()) - LAYERS


def test_a_conversion_that_something_else_reads_stays_for_it():
    """The norm of all gradients, by which they are clipped, is summed in float32."""
    before = program(clip=True)
    after, record = run_pass(SkipGradientCasts(), before)
    assert record.changes == LAYERS and len(after.ops()) == len(before.ops())
    assert gradient_types(after) == [torch.bfloat16] * LAYERS


def test_leaves_updates_in_aten_alone():
    _, record = run_pass(SkipGradientCasts(), program(AdamW(lr=1e-3), by_blocks=False))
    assert record.changes == 0 and not record.refusals


def test_leaves_gradients_that_are_not_converted_alone():
    _, record = run_pass(SkipGradientCasts(), program(low=torch.float32))
    assert record.changes == 0 and not record.refusals


def test_keeps_a_conversion_that_narrows():
    after, record = run_pass(SkipGradientCasts(), program(low=torch.float32, stored=torch.bfloat16))
    assert record.changes == 0 and "narrowed from torch.float32" in record.refusals[0].reason
    assert gradient_types(after) == [torch.bfloat16] * LAYERS
