"""fold-identities: what is an identity, and what only looks like one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphopt.capture.trace import trace_function
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import InputKind, OutputKind, Signature
from graphopt.passes.fold_identities import FoldIdentities
from tests.support.graphs import program_of, run_pass, targets

aten = torch.ops.aten


def joint_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    """A Program that is not differentiated any more."""
    return trace_function(function, *inputs, stage=Stage.JOINT)


@pytest.mark.parametrize(
    "identity",
    [
        lambda x: x.clone(),
        lambda x: x.t().t(),
        lambda x: x.permute(1, 0).permute(1, 0),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: aten._to_copy(x, dtype=torch.float32),
        lambda x: aten.alias(x),
        lambda x: aten.detach(x),
        lambda x: aten.lift_fresh_copy(x),
        lambda x: aten.view(x, [4, 4]),
        lambda x: aten._unsafe_view(x, [4, 4]),
        lambda x: aten.expand(x, [4, 4]),
        lambda x: aten.slice(x, 0, 0, 2**62),
        lambda x: aten.copy(torch.zeros(4, 4), x),
        lambda x: torch.cat([x]),
        lambda x: torch.cat([x, x.new_zeros(0, 4)]),
        lambda x: torch.cat([x.new_zeros(0), x]),
        lambda x: torch.native_dropout(x, 0.5, False)[0],
        lambda x: aten.split(x, 4)[0],
    ],
)
def test_folds_an_operator_that_changes_nothing(identity):
    program = joint_of(lambda x: identity(x.sin()).cos(), torch.randn(4, 4))
    after, record = run_pass(FoldIdentities(), program)
    cos = next(node for node in after.ops() if node.target is aten.cos.default)
    assert cos.args[0].target is aten.sin.default
    assert record.changes >= 1


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.to(torch.int32).float(),
        lambda x: x.t(),
        lambda x: x.t().contiguous(),
        lambda x: x[1:],
        lambda x: x.flip(0),
        lambda x: x[:1].expand(4, 4).clone(),
        lambda x: torch.cat([x, x]),
        lambda x: F.dropout(x, 0.5, True),
        lambda x: F.dropout(x, 0.0, True) * F.dropout(x, 1.0, True),
        lambda x: torch.empty_like(x).fill_(1) * x,
    ],
)
def test_keeps_an_operator_that_changes_something(operator):
    program = joint_of(lambda x: operator(x.sin()).cos(), torch.randn(4, 4))
    _, record = run_pass(FoldIdentities(), program)
    assert record.changes == 0


def test_a_bitcast_is_no_identity():
    after, _ = run_pass(FoldIdentities(), joint_of(lambda x: x.sin().view(torch.int32) + 1, torch.randn(4)))
    assert targets(after) == ["sin", "view", "add"]


def test_a_lazy_conjugate_is_no_identity():
    x = torch.tensor([1 + 2j])
    after, record = run_pass(FoldIdentities(), joint_of(lambda x: x.conj() * 2, x), inputs=(x,))
    assert record.changes == 0 and after.run((x,))[0].item() == 2 - 4j


def test_folds_for_every_user():
    program = joint_of(lambda x: (x.sin().clone(),), torch.randn(4))
    clone = program.ops()[1]
    users = [program.insert_before(program.output_node(), aten.exp.default, clone) for _ in range(3)]
    program.set_outputs(users, program.signature.outputs * 3)
    after, _ = run_pass(FoldIdentities(), program)
    assert targets(after) == ["sin", "exp", "exp", "exp"]


def test_views_of_a_folded_copy_share_the_memory_of_its_source():
    def function(x):
        hidden = x.sin()
        return hidden.clone().view(16).cos() + hidden.view(16)

    after, _ = run_pass(FoldIdentities(), joint_of(function, torch.randn(4, 4)))
    assert targets(after) == ["sin", "view", "cos", "add"]


def test_offsets_are_those_of_the_source_once_a_copy_is_folded():
    def function(x):
        top, bottom = x[:2], x[2:]
        return top.sin() + bottom.clone()[:].cos() + bottom.clone()[0].exp()

    x = torch.randn(4, 4)
    after, _ = run_pass(FoldIdentities(), joint_of(function, x), inputs=(x,))
    assert torch.equal(after.run((x,))[0], function(x))


def test_merges_reshapes():
    program = joint_of(lambda x: x.view(16).view(2, 8).view(8, 2).sin(), torch.randn(4, 4))
    after, record = run_pass(FoldIdentities(), program)
    assert targets(after) == ["view", "sin"] and record.changes == 2


def test_a_reshape_that_went_is_never_found_again():
    def function(x):
        return x.view(16).view(2, 8).sin().view(16) + x.view(16)

    x = torch.randn(4, 4)
    after, _ = run_pass(FoldIdentities(), joint_of(function, x), inputs=(x,))
    assert torch.equal(after.run((x,))[0], function(x))


def test_keeps_a_reshape_that_others_read():
    def function(x):
        flat = x.sin().view(16)
        return flat.view(2, 8) * 2, flat * 2

    after, _ = run_pass(FoldIdentities(), joint_of(function, torch.randn(4, 4)))
    assert targets(after) == ["sin", "view", "view", "mul", "mul"]


# ---- outputs stay independent -------------------------------------------------------------------------------------


def test_a_constant_read_later_takes_no_earlier_place():
    program = joint_of(lambda x: x + 1, torch.randn(4))
    add = program.ops()[0]
    first = program.insert_constant(add, torch.ones(4))
    alias = program.insert_before(add, aten.alias.default, first)
    product = program.insert_before(program.output_node(), aten.mul.Tensor, add, alias)
    with program.graph.inserting_before(program.output_node()):
        second = program.graph.get_attr(first.target)
    second.meta["val"] = program.value(first)
    program.set_outputs(
        [program.insert_before(program.output_node(), aten.mul.Tensor, product, second)], program.signature.outputs
    )
    after, record = run_pass(FoldIdentities(), program)
    assert targets(after) == ["add", "mul", "mul"] and record.changes == 1


def test_a_returned_copy_of_an_input_stays_a_copy():
    _, record = run_pass(FoldIdentities(), joint_of(lambda x: x.clone(), torch.randn(4)))
    assert record.changes == 0
    assert "share memory with an input" in record.refusals[0].reason or "input itself" in record.refusals[0].reason


def test_a_returned_view_of_a_copy_of_an_input_stays_a_copy():
    _, record = run_pass(FoldIdentities(), joint_of(lambda x: x.clone().view(2, 2), torch.randn(4)))
    assert record.changes == 0
    assert "share memory with an input" in record.refusals[0].reason


def test_two_returned_copies_stay_independent():
    def function(x):
        hidden = x.sin()
        return hidden, hidden.clone(), hidden.clone()

    x = torch.randn(4)
    after, record = run_pass(FoldIdentities(), joint_of(function, x))
    first, second, third = after.run((x,))
    assert len({first.data_ptr(), second.data_ptr(), third.data_ptr()}) == 3
    assert record.changes == 0 and len(record.refusals) == 2


def test_two_returned_views_of_a_value_and_its_copy_stay_independent():
    def function(x):
        hidden = x.sin()
        return hidden.view(4), hidden.clone().view(4, 1)

    _, record = run_pass(FoldIdentities(), joint_of(function, torch.randn(2, 2)))
    assert record.changes == 0 and "share memory with another output" in record.refusals[0].reason


def test_an_update_never_becomes_another_input():
    program = joint_of(lambda p, q: (q.clone().view(4), p + 1), torch.randn(4), torch.randn(4))
    inputs = tuple(replace(entry, kind=InputKind.PARAM) for entry in program.signature.inputs)
    outputs = tuple(replace(entry, kind=OutputKind.PARAM_UPDATE) for entry in program.signature.outputs)
    program.signature, program.stage = Signature(inputs, outputs), Stage.STEP
    after, record = run_pass(FoldIdentities(), program)
    assert "clone" in targets(after)
    assert record.refusals[0].reason == "arg1_1 would be returned as a second output or as an input itself"


def test_a_returned_copy_of_an_inner_value_is_folded():
    after, _ = run_pass(FoldIdentities(), joint_of(lambda x: x.sin().clone(), torch.randn(4)))
    assert targets(after) == ["sin"]


def test_memory_written_in_place_is_never_shared():
    program = joint_of(lambda x: x.sin().clone() + 1, torch.randn(4))
    sin, _, add = program.ops()
    program.insert_before(add, aten.mul_.Tensor, sin, 2)
    _, record = run_pass(FoldIdentities(), program)
    assert record.changes == 0 and "written in place" in record.refusals[0].reason


# ---- stage forward ------------------------------------------------------------------------------------------------


def test_detach_stays_before_differentiation():
    after, record = run_pass(FoldIdentities(), program_of(lambda x: x.sin().detach() * 2, torch.randn(4)))
    assert record.changes == 0 and "detach" in targets(after)


def test_a_view_of_a_detached_value_is_not_the_value():
    program = program_of(lambda x: x.sin().detach().t().t() * 2, torch.randn(4, 4))
    after, _ = run_pass(FoldIdentities(), program)
    assert after.ops()[-1].args[0].target is aten.detach.default


def test_folds_before_differentiation_where_the_gradient_is_summed_in_the_same_order():
    after, _ = run_pass(FoldIdentities(), program_of(lambda x: x.sin().clone().cos(), torch.randn(4)))
    assert targets(after) == ["sin", "cos"]


def test_refuses_before_differentiation_where_gradient_terms_would_be_reordered():
    def function(x):
        hidden = x.sin()
        copy = hidden.clone()
        return hidden.cos() + hidden.exp() + copy.tan()

    _, record = run_pass(FoldIdentities(), program_of(function, torch.randn(4)))
    assert record.changes == 0 and "another order" in record.refusals[0].reason
    after, _ = run_pass(FoldIdentities(), joint_of(function, torch.randn(4)))
    assert "clone" not in targets(after)


def test_folds_copies_of_integers_before_differentiation():
    def function(ids):
        return ids.clone() + ids + ids * 2

    after, _ = run_pass(FoldIdentities(), program_of(function, torch.arange(4)))
    assert "clone" not in targets(after)


# ---- memory -------------------------------------------------------------------------------------------------------


def test_saves_the_bytes_of_the_copy():
    def function(x):
        hidden = x.sin()
        copy = hidden.clone()
        return copy.cos() * hidden + copy

    program = joint_of(function, torch.randn(256))
    _, record = run_pass(FoldIdentities(), program)
    assert (record.peak_bytes_before, record.peak_bytes_after) == (4 * 1024, 3 * 1024)


def test_refuses_to_keep_a_large_memory_for_a_small_part():
    def function(x):
        large = x.repeat(1000)
        part = large[:4].clone()
        return part * x.sin().repeat(1000).sum()

    _, record = run_pass(FoldIdentities(), joint_of(function, torch.randn(4)))
    assert record.changes == 0
    assert record.refusals[0].reason == "would keep 16000 bytes of slice_1 alive instead of 16"


def test_refuses_to_delay_the_update_of_a_parameter_for_a_small_part_of_it():
    def function(x, p):
        part = p[:4].clone()
        new = p * 0.9
        return x.repeat(1000).sum() * part, new

    program = joint_of(function, torch.randn(4), torch.randn(1000))
    program.stage = Stage.STEP
    (x, p), (out, new) = program.signature.inputs, program.signature.outputs
    inputs = (x, replace(p, kind=InputKind.PARAM))
    program.signature = Signature(inputs, (out, replace(new, kind=OutputKind.PARAM_UPDATE)))
    _, record = run_pass(FoldIdentities(), program)
    assert record.changes == 0
    assert record.refusals[0].reason == "would keep 4000 bytes of slice_1 alive instead of 16"


# ---- case C76: depth ----------------------------------------------------------------------------------------------


def test_folds_a_chain_of_3000_copies_in_linear_time():
    def chain(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x):
            late = x
            for _ in range(length):
                late = late.clone().t()
            return late + 1

        return function

    program = joint_of(chain(1500), torch.randn(2, 2))
    started = time.process_time()
    changes = FoldIdentities().apply(program)
    assert targets(program)[-1] == "add" and len(program.ops()) <= 3
    assert changes.count >= 2998
    assert time.process_time() - started < 10
    assert plan_memory(program).peak_bytes == 16
