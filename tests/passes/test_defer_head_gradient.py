"""defer-head-gradient: a weight that is embedding and head gets the head's gradient where the lookup's is added."""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import checkpoint
from graphopt.build import bind_batch
from graphopt.capture.differentiate import differentiate
from graphopt.capture.export import OutputRequest, capture_program
from graphopt.capture.update import UpdateRequest, append_update
from graphopt.capture.update_bucket import make_bucket
from graphopt.ir.linear_loss import BACKWARD, WITH_GRADIENT, named_arguments
from graphopt.ir.liveness import plan_memory
from graphopt.ir.spec import Output, OutputKind
from graphopt.optim import SGD
from graphopt.passes import defer_head_gradient
from graphopt.passes.defer_head_gradient import DeferHeadGradient
from graphopt.passes.fuse_linear_loss import FuseLinearLoss
from graphopt.passes.merge_loss_gradient import MergeLossGradient
from graphopt.pipeline.default import step_pipeline
from graphopt.pipeline.pipeline import Pipeline
from graphopt.planner.decide import MemoryRequest
from tests.support.graphs import run_pass

VOCABULARY, WIDTH, LAYERS = 400, 16, 3
TABLE_BYTES = VOCABULARY * WIDTH * 4


class LanguageModel(nn.Module):
    """Layers between an embedding and a head, which are one weight if ``tied``."""

    def __init__(self, *, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "hidden": hidden}


def batch():
    return {"ids": torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))}


def fused_step(model=None):
    """Forward with the fused loss, backward, and an update by SGD, before any step pass."""
    model = model or LanguageModel()
    captured = capture_program(model, bind_batch(model, batch()), OutputRequest(("loss",)))
    program = Pipeline((FuseLinearLoss(min_logits_bytes=0, chunk=5),)).run(captured.program)
    joint = differentiate(program, roots=["loss"], wrt=[name for name, _ in model.named_parameters()])
    names = tuple(output.name for _, output in joint.signature.outputs_of(OutputKind.GRAD))
    rule = SGD(lr=0.1)
    bucket = make_bucket(rule, rule.options(), name="0", parameters=names)
    return append_update(joint, UpdateRequest(rule, (bucket,), clip=False))


def needs(program):
    """What each backward of the fused loss gives, in order."""
    return [named_arguments(node)["needs"] for node in program.ops() if node.target in (BACKWARD, WITH_GRADIENT)]


def test_the_weights_gradient_moves_to_its_reader():
    program = fused_step()
    assert needs(program) == [[True, True, False]]
    after, record = run_pass(DeferHeadGradient(), program)
    assert needs(after) == [[True, False, False], [False, True, False]] and record.changes == 1
    late = next(node for node in reversed(after.ops()) if node.target is BACKWARD)
    (gradient,) = late.users
    assert [user.target for user in gradient.users] == [torch.ops.aten.add.Tensor]
    assert late.next is gradient and gradient.next in gradient.users


def test_what_the_loss_gives_at_once_is_still_merged():
    after, _ = run_pass(MergeLossGradient(), run_pass(DeferHeadGradient(), fused_step())[0])
    assert [node.target for node in after.ops() if node.target in (BACKWARD, WITH_GRADIENT)] == [
        WITH_GRADIENT,
        BACKWARD,
    ]
    assert needs(after) == [[True, False, False], [False, True, False]]


def test_the_gradient_is_not_held_during_the_backward_of_the_layers():
    request = MemoryRequest(checkpoint.EveryN(1))
    pipeline = step_pipeline(request)
    with_pass, without = pipeline.run(fused_step()), pipeline.without("defer-head-gradient").run(fused_step())
    held = [_held_at_first_layer(program) for program in (without, with_pass)]
    assert held[0] - held[1] >= TABLE_BYTES - 5 * 18 * WIDTH * 4  # some rows are held in its place


def _held_at_first_layer(program):
    """Bytes held while the gradient goes through the layer behind the embedding."""
    plan = plan_memory(program)
    grads = [
        i
        for i, node in enumerate(plan.order)
        if program.origin(node).module == "layers.1" and program.origin(node).is_gradient
    ]
    return plan.live_bytes[grads[0]]


def test_a_weight_that_is_only_the_head_is_left_alone():
    _, record = run_pass(DeferHeadGradient(), fused_step(LanguageModel(tied=False)))
    assert record.changes == 0 and "can use the weight's gradient at once" in record.refusals[0].reason


def test_keeps_a_gradient_that_another_call_reads():
    program = fused_step()
    first = next(node for node in program.ops() if node.target is BACKWARD)
    gradient = next(user for user in first.users if user.args[1] == 1)
    total = program.insert_before(program.output_node(), torch.ops.aten.sum.default, gradient)
    program.set_outputs(
        [*program.output_values(), total],
        [*program.signature.outputs, Output("total", OutputKind.USER, program.spec(total))],
    )
    _, record = run_pass(DeferHeadGradient(), program)
    assert record.changes == 0 and "several calls read it" in record.refusals[0].reason


@pytest.mark.parametrize(("budget", "changes"), [("1GiB", 0), (1000, 1), (Fraction(1, 2), 1)])
def test_a_budget_that_holds_without_it_is_left_alone(budget, changes):
    _, record = run_pass(DeferHeadGradient(budget), fused_step())
    assert record.changes == changes


def test_a_late_call_holds_few_logits_at_a_time(monkeypatch):
    monkeypatch.setattr(defer_head_gradient, "_FEWEST_CLASSES", 1)
    monkeypatch.setattr(defer_head_gradient, "_PIECE_BYTES", 2 * VOCABULARY * 4)
    after, _ = run_pass(DeferHeadGradient(), fused_step())
    assert [named_arguments(node)["chunk"] for node in after.ops() if node.target is BACKWARD] == [5, 2]


@pytest.mark.parametrize("policy", [checkpoint.EveryN(1), checkpoint.SqrtN()])
def test_training_stays_close_to_eagers(policy, monkeypatch):
    monkeypatch.setattr("graphopt.passes.fuse_linear_loss.FuseLinearLoss.min_logits_bytes", 0)
    model = LanguageModel()
    twin = copy.deepcopy(model)
    step = graphopt.compile(model, outputs=["loss"], optimizer=SGD(lr=0.1), checkpoint=policy)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        step(**batch())
        reference.zero_grad()
        twin(**batch())["loss"].backward()
        reference.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        # Sums of at most 18 x 400 float32 terms in another order, three steps.
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_is_part_of_a_step_that_computes_again_and_of_no_other():
    assert "defer-head-gradient" not in str(step_pipeline())
    assert "defer-head-gradient" not in str(step_pipeline(MemoryRequest(checkpoint.Offload())))
    for request in (MemoryRequest(checkpoint.EveryN(1)), MemoryRequest(None, "1GiB")):
        assert str(step_pipeline(request)).startswith("defer-head-gradient")
