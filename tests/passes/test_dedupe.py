"""dedupe: true duplicates are merged where it costs no memory; what only looks equal is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphopt.capture.differentiate import differentiate
from graphopt.capture.trace import trace_function
from graphopt.ir.liveness import plan_memory, saved_bytes
from graphopt.ir.program import Program, Stage
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from tests.support.graphs import program_of, run_pass, targets

aten = torch.ops.aten


def joint_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    """A Program that is not differentiated any more."""
    return trace_function(function, *inputs, stage=Stage.JOINT)


def test_merges_equal_products():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    program = joint_of(lambda x, w: x @ w + x @ w, x, w)
    after, record = run_pass(Dedupe(), program, inputs=(x, w))
    assert targets(after) == ["mm", "add"] and record.changes == 1


def test_merges_calls_whose_arguments_were_merged():
    program = joint_of(lambda x: x.sin().cos().exp() + x.sin().cos().exp(), torch.randn(4))
    after, record = run_pass(Dedupe(), program)
    assert targets(after) == ["sin", "cos", "exp", "add"] and record.changes == 3


def test_merges_for_every_user():
    def function(x):
        first, second, third = x.sin(), x.sin(), x.sin()
        return first * 2 + second * 3 + third * 4

    after, record = run_pass(Dedupe(), joint_of(function, torch.randn(4)))
    assert targets(after).count("sin") == 1 and record.changes == 2


def test_merges_operators_with_several_results():
    def function(x):
        first, second = x.max(dim=0), x.max(dim=0)
        return first[0] + second[0] + second[1]

    x = torch.randn(4, 4)
    after, record = run_pass(Dedupe(), joint_of(function, x), inputs=(x,))
    assert targets(after).count("max") == 1 and record.changes == 3
    assert torch.equal(after.run((x,))[0], function(x))


def test_merges_constants_read_twice():
    program = joint_of(lambda x: x + 1, torch.randn(4))
    constant = program.insert_constant(program.ops()[0], torch.ones(4))
    first = program.insert_before(program.output_node(), aten.add.Tensor, program.ops()[0], constant)
    with program.graph.inserting_before(first):
        twin = program.graph.get_attr(constant.target)
    twin.meta["val"] = program.fake_mode.from_tensor(program.constant(constant), static_shapes=True)
    second = program.insert_before(program.output_node(), aten.mul.Tensor, first, twin)
    program.set_outputs([second], program.signature.outputs)
    after, record = run_pass(Dedupe(), program)
    assert len(after.constants()) == 1 and record.changes == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5),
        lambda x: torch.rand(4) - torch.rand(4) + x,
        lambda x: torch.rand_like(x) - torch.rand_like(x),
        lambda x: x.to(torch.bfloat16).float() + x,
        lambda x: aten.add.Tensor(x, 1) + aten.add.Tensor(x, 1.0) + aten.add.Tensor(x, True),
        lambda x: aten.add.Tensor(x, 0.0) * aten.add.Tensor(x, -0.0),
        lambda x: aten.sum.dim_IntList(x, [0], True) + aten.sum.dim_IntList(x, [0], False),
        lambda x: x.sum(dtype=torch.float64).float() + x.sum(),
        lambda x: aten.add.Tensor(x, x, alpha=2) + aten.add.Tensor(x, x, alpha=3),
        lambda x: torch.empty_like(x).fill_(0) + torch.empty_like(x).fill_(1) + x,
    ],
)
def test_keeps_what_only_looks_equal(function):
    program = joint_of(function, torch.randn(4))
    after, record = run_pass(Dedupe(), program)
    assert record.changes == 0 or targets(after).count("empty_like") == targets(program).count("empty_like") == 2


def test_keeps_two_returned_values_independent():
    x = torch.randn(4)
    program = joint_of(lambda x: (x.clone(), x.clone()), x)
    after, record = run_pass(Dedupe(), program)
    first, second = after.run((x,))
    assert first.data_ptr() != second.data_ptr() and record.changes == 0


def test_keeps_two_returned_views_two_tensors():
    x = torch.randn(4, 4)
    program = joint_of(lambda x: (x.t(), x.t()), x)
    after, _ = run_pass(Dedupe(), program)
    first, second = after.run((x,))
    assert first is not second


def test_a_returned_value_and_an_inner_twin_are_merged():
    program = joint_of(lambda x: (x.sin(), x.sin().sum()), torch.randn(4))
    after, _ = run_pass(Dedupe(), program)
    assert targets(after) == ["sin", "sum"]


# ---- case C14: random and order-dependent nodes --------------------------------------------------------------------


def test_two_dropouts_of_one_value_stay_two():
    x = torch.ones(4000)
    after, _ = run_pass(Dedupe(), joint_of(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), x), inputs=(x,))
    torch.manual_seed(0)
    assert after.run((x,))[0].unique().tolist() == [0.0, 2.0, 4.0]


def test_reads_on_two_sides_of_a_write_stay_two():
    program = joint_of(lambda x: x.clone().sum() * 1, torch.zeros(10))
    clone, total, scaled = program.ops()
    program.insert_before(scaled, aten.add_.Tensor, clone, 1)
    again = program.insert_before(scaled, aten.sum.default, clone)
    scaled.args = (again, total)
    scaled.target = aten.sub.Tensor
    x = torch.zeros(10)
    assert program.run((x,))[0].item() == 10.0
    after, record = run_pass(Dedupe(), program, inputs=(x,))
    assert after.run((x,))[0].item() == 10.0 and record.changes == 0


def test_reads_without_a_write_between_them_are_merged_in_an_in_place_program():
    program = joint_of(lambda x: x.clone().sum() * x.sin(), torch.zeros(10))
    clone, total, sin, product = program.ops()
    program.insert_before(total, aten.add_.Tensor, clone, 1)
    again = program.insert_before(product, aten.sum.default, clone)
    product.args = (total, program.insert_before(product, aten.mul.Tensor, again, sin))
    after, _ = run_pass(Dedupe(), program)
    assert targets(after).count("sum") == 1


# ---- memory -------------------------------------------------------------------------------------------------------


def test_saves_the_bytes_of_the_second_value():
    def function(x):
        first, second = x.sin(), x.sin()
        return first.cos() * second + first

    _, record = run_pass(Dedupe(), joint_of(function, torch.randn(256)))
    assert (record.peak_bytes_before, record.peak_bytes_after) == (4 * 1024, 3 * 1024)


def test_refuses_to_hold_a_value_across_the_peak():
    def function(x):
        early = x.sin().sum()
        peak = x.repeat(100).cos().sum()
        late = x.sin().exp().sum()
        return early + peak + late

    after, record = run_pass(Dedupe(), joint_of(function, torch.randn(2048)))
    assert targets(after).count("sin") == 2
    assert record.refusals[0].reason == "equals sin, but holding 8192 bytes until then would raise the peak"
    assert record.peak_bytes_after == record.peak_bytes_before


def test_holds_a_value_where_there_is_room():
    def function(x):
        early = x.sin().sum()
        between = x.cos().sum()
        late = x.sin().exp().sum()
        peak = x.repeat(100).cos().sum()
        return early + peak + late + between

    after, record = run_pass(Dedupe(), joint_of(function, torch.randn(2048)))
    assert targets(after).count("sin") == 1
    assert record.peak_bytes_after == record.peak_bytes_before


def test_refuses_to_save_a_recomputed_value_for_backward():
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    program = differentiate(program_of(lambda x, w: (F.gelu(x) @ w).sum(), x, w), roots=["0"], wrt=["1"])
    gelu, gradient = program.ops()[0], program.output_values()[-1]
    again = program.insert_before(gradient, aten.gelu.default, *gelu.args)
    gradient.replace_input_with(gradient.args[0], program.insert_before(gradient, aten.t.default, again))
    program = run_pass(DropDead(), program)[0]
    after, record = run_pass(Dedupe(), program)
    assert targets(after).count("gelu") == 2 and saved_bytes(after) == saved_bytes(program)
    assert record.refusals[0].reason == "equals gelu, but would keep 16384 bytes alive from forward to backward"


def test_merges_views_of_parameters_across_the_border():
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    program = differentiate(program_of(lambda x, w: (x @ w.t()).sum(), x, w), roots=["0"], wrt=["0"])
    tangent = program.placeholders()[-1]
    late = program.insert_before(program.output_node(), aten.t.default, program.input_named("1"))
    expand = next(iter(tangent.users))
    product = program.insert_before(program.output_node(), aten.mm.default, expand, late)
    program.set_outputs([*program.output_values()[:-1], product], program.signature.outputs)
    after, record = run_pass(Dedupe(), program)
    assert record.changes >= 1
    assert targets(after).count("t") < targets(program).count("t")
    assert record.saved_bytes_after == record.saved_bytes_before


def test_an_equal_mask_in_backward_saves_nothing_more():
    def function(x, w):
        mask = x > 0
        return (x * mask * w).sum()

    x, w = torch.randn(64, 64), torch.randn(64, 64)
    program = differentiate(program_of(function, x, w), roots=["0"], wrt=["1"])
    gradient = program.output_values()[-1]
    again = program.insert_before(gradient, aten.gt.Scalar, program.input_named("0"), 0)
    product = program.insert_before(gradient, aten.mul.Tensor, program.input_named("0"), again)
    gradient.replace_input_with(gradient.args[1], product)
    after, record = run_pass(Dedupe(), program)
    assert saved_bytes(after) <= saved_bytes(program)
    assert record.peak_bytes_after <= record.peak_bytes_before


# ---- stage forward ------------------------------------------------------------------------------------------------


def test_refuses_before_differentiation_where_gradients_would_round_differently():
    def function(x, w):
        return ((x @ w).sin() + (x @ w).cos()).sum()

    x, w = torch.randn(64, 64), torch.randn(64, 64)
    forward, record = run_pass(Dedupe(), program_of(function, x, w))
    assert record.changes == 0 and "another order" in record.refusals[0].reason
    joint = differentiate(forward, roots=["0"], wrt=["1"])
    assert targets(run_pass(Dedupe(), joint)[0]).count("mm") < targets(joint).count("mm")


def test_merges_masks_before_differentiation():
    def function(x, ids):
        return x * (ids > 2) + x * (ids > 2)

    after, record = run_pass(Dedupe(), program_of(function, torch.randn(4), torch.arange(4)))
    assert targets(after).count("gt") == 1 and record.changes == 1


# ---- case C76: depth ----------------------------------------------------------------------------------------------


def test_merges_two_chains_of_1500_in_linear_time():
    def function(x):
        left, right = x, x
        for _ in range(1500):
            left, right = left.sin(), right.sin()
        return left + right

    program = joint_of(function, torch.randn(2, 2))
    started = time.process_time()
    assert Dedupe().apply(program).count == 1500
    assert time.process_time() - started < 10
    assert len(program.ops()) == 1501 and plan_memory(program).peak_bytes == 32


def test_a_diamond_stays_exact():
    def function(x):
        for _ in range(60):
            x = x + x
        return x

    x = torch.ones(1, dtype=torch.float64)
    after, record = run_pass(Dedupe(), joint_of(function, x), inputs=(x,))
    assert after.run((x,))[0].item() == 2.0**60 and record.changes == 0
