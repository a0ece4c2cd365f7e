from __future__ import annotations

import pytest
import torch

from graphopt.build import training_program
from graphopt.ir import ops
from graphopt.ir.decisions import Action
from graphopt.ir.liveness import forward_end, plan_memory, saved_bytes
from graphopt.ir.offloadable import offloadable
from graphopt.ir.program import Program, Stage
from graphopt.ir.transfer_ops import ARRIVED, OFFLOAD, OFFLOADED, PREFETCH
from graphopt.passes.offload import Offload
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import run_pass, targets
from tests.support.offload import decide_offload

TICKET_BYTES = 8


class Of(torch.nn.Module):
    """A function of a batch ``x`` and a parameter as a model whose output is the loss."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return {"loss": self.function(x, self.w)}


def joint_of(function, *, shape=(8, 8)) -> Program:
    program = training_program(Of(function, *shape), torch.randn(*shape), outputs=["loss"])
    program.stage = Stage.STEP
    return program


def chain(x, w, depth=6):
    for _ in range(depth):
        x = (x @ w).sin()
    return x.sum()


def calls(program: Program, target) -> list[int]:
    return [i for i, node in enumerate(program.ops()) if ops.is_call(node, target)]


def most_at_once(program: Program, starts, ends) -> int:
    """How many copies of one direction are under way at most."""
    level = most = 0
    for node in program.ops():
        level += ops.is_call(node, starts) - ops.is_call(node, ends)
        most = max(most, level)
    return most


def short(x, w):
    return ((x @ w).sin() * 2 + 1).mean()


def test_a_decided_value_leaves_and_comes_back():
    before = decide_offload(joint_of(short), "mm")
    after, record = run_pass(Offload(), before)
    kept = [name for name in targets(after) if name not in ("detach", "t")]
    assert kept == [
        "mm",
        "graphopt",
        "sin",
        "graphopt",
        "mul",
        "add",
        "mean",
        "expand",
        "graphopt",
        "div",
        "mul",
        "graphopt",
        "cos",
        "mul",
        "mm",
    ]
    assert record.changes == 1
    assert saved_bytes(before) - saved_bytes(after) == 8 * 8 * 4 - TICKET_BYTES
    assert [node.target for node in after.ops() if ops.is_transfer(node)] == [OFFLOAD, OFFLOADED, PREFETCH, ARRIVED]


def test_without_a_decision_nothing_changes():
    _, record = run_pass(Offload(), joint_of(chain))
    assert record.changes == 0 and record.refusals == ()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 50])
def test_prefetch_bounds_what_is_in_flight(prefetch):
    after, record = run_pass(Offload(prefetch=prefetch), decide_offload(joint_of(chain)))
    assert record.changes >= 5
    assert most_at_once(after, OFFLOAD, OFFLOADED) <= max(prefetch, 1)
    assert most_at_once(after, PREFETCH, ARRIVED) <= max(prefetch, 1)
    if prefetch in (2, 3):
        assert most_at_once(after, PREFETCH, ARRIVED) == prefetch


def test_copies_in_start_behind_the_border_and_copies_out_end_before_it():
    before = decide_offload(joint_of(chain))
    after, _ = run_pass(Offload(), before)
    assert forward_end(after) - forward_end(before) == len(calls(after, OFFLOAD)) + len(calls(after, OFFLOADED))
    assert max(calls(after, OFFLOADED)) < forward_end(after) < min(calls(after, PREFETCH))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_peak_falls_with_the_values_that_are_gone(prefetch):
    before = decide_offload(joint_of(lambda x, w: chain(x, w, depth=12), shape=(32, 32)))
    after, _ = run_pass(Offload(prefetch=prefetch), before)
    value_bytes = 32 * 32 * 4
    saved = plan_memory(before).peak_bytes - plan_memory(after).peak_bytes
    assert saved >= (11 - 2 * prefetch) * value_bytes - 24 * TICKET_BYTES


def through_views(x, w):
    h = x @ w
    rows, _ = h.split(4)
    return (rows.t().sin() @ h[2:6].cos()).sum() + h.view(-1)[::3].exp().sum()


def test_views_are_made_again_from_what_came_back():
    after, record = run_pass(Offload(), decide_offload(joint_of(through_views), "mm"))
    back = [node for node in after.ops() if ops.is_call(node, ARRIVED)]
    assert record.changes == 1 and len(back) == 1
    forward = after.ops()[: forward_end(after)]
    late = after.ops()[forward_end(after) :]
    crossing = {argument for node in late for argument in node.all_input_nodes if argument in forward}
    (home,) = [node for node in forward if node.name == "mm"]
    views = [node for node in crossing if after.value(node).untyped_storage() == after.value(home).untyped_storage()]
    assert views == []


def test_a_value_with_several_users_comes_back_once():
    after, record = run_pass(
        Offload(), decide_offload(joint_of(lambda x, w: (y := x @ w, (y.sin() * y.cos()).sum())[1]))
    )
    assert record.changes == len(calls(after, OFFLOAD)) == len(calls(after, ARRIVED))


def normalised(x, w):
    return (torch.nn.functional.layer_norm(x @ w, (8,)) @ w).sin().sum()


def test_results_of_operators_with_several_can_leave():
    before = joint_of(normalised)
    picks = [node.name for node in before.ops()[: forward_end(before)] if ops.is_getitem(node) and node.users]
    names = [name for name in picks if offloadable(before, by_name(before, name)) is None]
    assert len(names) >= 2
    _, record = run_pass(Offload(), decide_offload(before, *names))
    assert record.changes == len(names)


def test_what_came_back_is_written_in_place_only_when_it_is_complete():
    after, _ = run_pass(Offload(), decide_offload(joint_of(chain)))
    last = Pipeline((ReuseLastUse(),)).run(after, verify="numeric")
    written = {argument for node in last.ops() for argument in ops.mutated_arguments(node)}
    buffers = [node for node in last.ops() if ops.is_call(node, PREFETCH)]
    assert any(ops.is_call(node, ARRIVED) for node in written)
    assert written.isdisjoint(buffers)


def by_name(program: Program, name: str) -> torch.fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def with_output(x, w):
    h = x @ w
    return {"loss": h.sin().sum(), "h": h}


class WithOutput(Of):
    def forward(self, x):
        return with_output(x, self.w)


def returned_program() -> Program:
    program = training_program(WithOutput(None, 4, 4), torch.randn(4, 4), outputs=["loss", "h"])
    program.stage = Stage.STEP
    return program


REFUSED = {
    "input": (lambda: joint_of(chain), "x", "it belongs to the caller"),
    "view": (
        lambda: joint_of(through_views),
        "view",
        "it is a view of mm, whose memory would have to leave: offload that",
    ),
    "view of an input": (lambda: joint_of(lambda x, w: (x[1:] @ w).sin().sum()), "slice_1", "memory of an input"),
    "output": (returned_program, "mm", "it shares memory with an output"),
    "unread": (lambda: joint_of(lambda x, w: (x @ w + 1).sum()), "mm", "only the forward reads it"),
    "backward": (lambda: joint_of(chain), "cos", "it is made by the backward"),
    "first": (lambda: joint_of(lambda x, w: (x @ w).prod()), "mul", "the first operator of the backward reads it"),
    "at once": (lambda: joint_of(lambda x, w: (x @ w).exp().sum()), "exp", "gone only while nothing is allocated"),
    "unknown": (lambda: joint_of(chain), "nobody", "no value has this name any more"),
    "several": (lambda: joint_of(normalised), "native_layer_norm", "it is not one strided tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason_that_the_table_of_decisions_keeps(name):
    make, value, reason = REFUSED[name]
    after, record = run_pass(Offload(), decide_offload(make(), value))
    assert record.changes == 0 and [refusal.node for refusal in record.refusals] == [value]
    assert reason in record.refusals[0].reason
    row = after.decisions.of(value)
    assert row.action is Action.SAVE and reason in row.reason and row.reason.startswith("not offloaded: ")
