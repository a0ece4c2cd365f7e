"""drop-dead: what goes, the roots that stay, and (at the end) random programs through this and other exact passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphopt.capture.trace import trace_function
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import InputKind, OutputKind, Signature
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.fold_identities import FoldIdentities
from graphopt.passes.simplify_algebra import SimplifyAlgebra
from graphopt.pipeline.pass_base import Changes, Pass
from tests.support.graphs import program_of, run_pass, targets

aten = torch.ops.aten


def test_drops_a_chain_that_no_output_needs():
    def function(x):
        unused = x.exp().cos() @ x
        return x.sin(), unused.relu()

    program = program_of(function, torch.randn(4, 4))
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    after, record = run_pass(DropDead(), program)
    assert targets(after) == ["sin"]
    assert record.changes == 4


def test_drops_the_picked_element_and_then_its_operator():
    program = program_of(lambda x: (x + 1, x.max(dim=0)[0]), torch.randn(4, 4))
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    after, _ = run_pass(DropDead(), program)
    assert targets(after) == ["add"]


def test_drops_constants_that_nothing_reads():
    program = program_of(lambda x: x + 1, torch.randn(4))
    program.insert_constant(program.ops()[0], torch.ones(4))
    after, record = run_pass(DropDead(), program)
    assert after.constants() == () and len(after.module._buffers) == 0
    assert record.changes == 1


def test_keeps_a_value_with_one_dead_and_one_live_user():
    program = program_of(lambda x: (x.exp() + 1, x.exp().cos()), torch.randn(4))
    shared = program.ops()[0]
    program.ops()[2].replace_input_with(program.ops()[2].args[0], shared)
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    after, _ = run_pass(DropDead(), program)
    assert targets(after) == ["exp", "add"]


def test_changes_nothing_when_all_is_needed():
    _, record = run_pass(DropDead(), program_of(lambda x: (x.exp() + 1).sum(), torch.randn(4)))
    assert record.changes == 0


def test_lowers_the_peak_by_what_was_dead():
    def function(x):
        hidden = x.exp()
        wide = hidden.repeat(100)
        return hidden + 1, wide

    program = program_of(function, torch.randn(64))
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    before_bytes = plan_memory(program).peak_bytes
    after, _ = run_pass(DropDead(), program)
    assert before_bytes == 64 * 4 * 101
    assert plan_memory(after).peak_bytes == 64 * 4 * 2


# ---- case C11: writes whose result is unused ----------------------------------------------------------------------


def test_keeps_statement_only_writes_after_functionalisation():
    def function(x, a):
        y = x.clone()
        y.mul_(a)
        y[0] = 5
        y.clamp_(max=3)
        y[1:].add_(1)
        return y.sum()

    x, a = torch.tensor([-2.0, 4.0]), torch.tensor(0.5)
    after, _ = run_pass(DropDead(), program_of(function, x, a), inputs=(x, a))
    assert after.run((x, a))[0].item() == 6.0


def test_keeps_an_in_place_operator_without_users():
    program = program_of(lambda x: x.clone().sum(), torch.randn(2))
    clone, total = program.ops()
    program.insert_before(total, aten.mul_.Scalar, clone, 0.5)
    _, record = run_pass(DropDead(), program)
    assert record.changes == 0


def test_keeps_assertions():
    program = program_of(lambda x: x + 1, torch.ones(2))
    condition = program.insert_before(program.ops()[0], aten.all.default, program.placeholders()[0])
    program.insert_before(program.ops()[1], aten._assert_async.msg, condition, "all must hold")
    assert run_pass(DropDead(), program, inputs=(torch.ones(2),))[1].changes == 0


# ---- case C12: updates of buffers ---------------------------------------------------------------------------------


def test_keeps_buffer_updates_that_no_user_output_needs():
    def function(x, steps, ema):
        return x.sum(), steps + 1, ema * 0.9 + 0.1 * x.mean(0)

    inputs = (torch.randn(5, 4), torch.tensor(0), torch.zeros(4))
    program = _with_buffers(program_of(function, *inputs))
    after, record = run_pass(DropDead(), program, inputs=inputs)
    assert record.changes == 0
    assert after.run(inputs)[1].item() == 1 and after.run(inputs)[1].dtype == torch.int64


def test_keeps_batch_norm_that_writes_running_statistics_behind_its_schema():
    def function(x, mean, variance):
        normed = aten.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)
        return x + 1, normed[0]

    program = program_of(function, torch.randn(5, 4), torch.zeros(4), torch.ones(4))
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    DropDead().apply(program)
    assert targets(program) == ["native_batch_norm", "add"]


def _with_buffers(program: Program) -> Program:
    inputs = [replace(entry, kind=InputKind.BUFFER) for entry in program.signature.inputs[1:]]
    outputs = [replace(entry, kind=OutputKind.BUFFER_UPDATE) for entry in program.signature.outputs[1:]]
    program.signature = Signature((program.signature.inputs[0], *inputs), (program.signature.outputs[0], *outputs))
    return program


# ---- random draws -------------------------------------------------------------------------------------------------


def test_keeps_dead_draws_so_that_other_draws_stay_equal_to_eager():
    def function(x):
        unused = torch.bernoulli(x, 0.5)
        return F.dropout(x, 0.5), unused, torch.rand(3)

    x = torch.ones(100)
    program = program_of(function, x)
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    after, record = run_pass(DropDead(), program)
    torch.manual_seed(3)
    expected, state = function(x)[0], torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(after.run((x,))[0], expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(record.refusals) == 2 and "random draw" in record.refusals[0].reason


def test_drops_dropout_that_does_not_draw():
    program = program_of(lambda x: (x + 1, torch.native_dropout(x, 0.5, False)[1]), torch.ones(4))
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    after, record = run_pass(DropDead(), program)
    assert targets(after) == ["add"] and record.refusals == ()


# ---- case C76: depth ----------------------------------------------------------------------------------------------


def test_drops_a_chain_of_3000_operators():
    def function(x):
        late = x
        for _ in range(3000):
            late = late + 1
        return x * 2, late

    program = program_of(function, torch.randn(2))
    program.set_outputs(program.output_values()[:1], program.signature.outputs[:1])
    assert DropDead().apply(program) == Changes(3000)
    assert targets(program) == ["mul"]


# ---- all exact passes on random programs --------------------------------------------------------------------------

SPECIAL = (0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3e38, 0, 1, 2, 3, 4, 5)

EXACT_PASSES: tuple[Pass, ...] = (DropDead(), FoldIdentities(), Dedupe(), SimplifyAlgebra())

UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda a: a.clone(),
    lambda a: a.t(),
    lambda a: a.contiguous(),
    lambda a: a.detach(),
    lambda a: aten.view(a.contiguous(), [16]).view(4, 4),
    lambda a: torch.cat([a[:2], a[2:]]),
    lambda a: torch.cat([a]),
    lambda a: a[2:].clone().repeat(2, 1),
    lambda a: a * 1.0,
    lambda a: a * 2,
    lambda a: a * 0,
    lambda a: a / 1,
    lambda a: a + 0.0,
    lambda a: a - 0.0,
    lambda a: a - torch.zeros_like(a),
    lambda a: -a,
    lambda a: a**1,
    lambda a: a.to(torch.bfloat16).float(),
    lambda a: a.double().float(),
    lambda a: a.sin(),
    lambda a: a + a.sum(),
    lambda a: F.dropout(a, 0.5),
    lambda a: a.max(dim=0)[0].expand(4, 4),
)


def functional_copy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What functionalisation makes of ``a.copy_(b)``."""
    return aten.copy(a, b)


BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - b,
    lambda a, b: a @ b,
    functional_copy,  # the last: autograd has no formula for it
)

Step = tuple[int, int, int]
steps_and_outputs = st.tuples(
    st.lists(
        st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99), st.integers(0, 99)), max_size=14
    ),
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
)


def random_function(steps: Sequence[Step], outputs: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of two [4, 4] tensors that runs ``steps``, each on earlier values, and returns some values."""

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for operator, left, right in steps:
            a, b = values[-1 - left % len(values)], values[-1 - right % len(values)]
            values.append(UNARY[operator](a) if operator < len(UNARY) else BINARY[operator - len(UNARY)](a, b))
        return tuple(values[-1 - index % len(values)] for index in outputs)

    return function


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    """Equal in dtype, shape, values and signs of zero; NaN equals NaN."""
    assert left.dtype == right.dtype and left.shape == right.shape
    nan = left.isnan()
    assert torch.equal(nan, right.isnan())
    assert torch.equal(left.masked_fill(nan, 0), right.masked_fill(nan, 0))
    assert torch.equal(left.masked_fill(nan, 0).signbit(), right.masked_fill(nan, 0).signbit())


def special_inputs() -> tuple[torch.Tensor, ...]:
    """Two [4, 4] tensors: one with every special number, one of ordinary numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.tensor(SPECIAL).view(4, 4), torch.randn(4, 4, generator=generator)


def shared_memory(values: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    """The pairs of positions whose tensors share memory."""
    where = [value.untyped_storage().data_ptr() for value in values]
    return {(i, j) for i in range(len(where)) for j in range(i) if where[i] == where[j]}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=steps_and_outputs, stage=st.sampled_from([Stage.FORWARD, Stage.JOINT, Stage.STEP]))
def test_exact_passes_keep_every_bit_and_the_peak_of_random_programs(drawn, stage):
    inputs = special_inputs()
    program = trace_function(random_function(*drawn), *inputs, stage=stage)
    if stage is Stage.STEP:
        _let_the_last_output_update_the_last_input(program)
    for item in EXACT_PASSES:
        after, record = run_pass(item, program, inputs=inputs)
        before_values, after_values = _run_seeded(program, inputs), _run_seeded(after, inputs)
        for left, right in zip(before_values, after_values, strict=True):
            assert_same_bits(left, right)
        assert shared_memory((*inputs, *after_values)) <= shared_memory((*inputs, *before_values))
        assert record.peak_bytes_after <= record.peak_bytes_before
        program = after


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=steps_and_outputs)
def test_exact_passes_keep_every_bit_of_the_gradients_of_random_programs(drawn):
    inputs = (special_inputs()[1], special_inputs()[1] * 3)
    steps = [step for step in drawn[0] if step[0] < len(UNARY) + BINARY.index(functional_copy)]
    program = program_of(random_function(steps, drawn[1]), *inputs)
    expected = _gradients(program, inputs)
    for item in EXACT_PASSES:
        program, _ = run_pass(item, program, inputs=inputs)
    for left, right in zip(expected, _gradients(program, inputs), strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert_same_bits(left, right)


def _let_the_last_output_update_the_last_input(program: Program) -> None:
    *inputs, last_input = program.signature.inputs
    *outputs, last_output = program.signature.outputs
    updated = replace(last_input, kind=InputKind.PARAM)
    update = replace(last_output, name=updated.name, kind=OutputKind.PARAM_UPDATE)
    program.signature = Signature((*inputs, updated), (*outputs, update))


def _run_seeded(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return program.run(inputs)


def _gradients(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    torch.manual_seed(0)
    leaves = [value.clone().requires_grad_() for value in inputs]
    values = fx.Interpreter(program.module).run(*leaves, enable_io_processing=False)
    values = [value for value in values if value.requires_grad]
    if not values:
        return (None,) * len(inputs)
    weights = [torch.linspace(0.1, 1.7 + i, 16).view(4, 4) for i, _ in enumerate(values)]
    return torch.autograd.grad(values, leaves, weights, allow_unused=True)
