"""prefetch-state: the first range of paged state is fetched ahead of its update, and the plan counts where it goes."""

from __future__ import annotations

import pytest
import torch

from graphopt import optim
from graphopt.execute.paging import engine
from graphopt.ir import ops
from graphopt.ir.liveness import forward_end, plan_memory
from graphopt.ir.program import Program
from graphopt.passes.prefetch_state import PrefetchState
from tests.support.graphs import run_pass
from tests.support.paging import Tensors, compiled, paged_step_program
from tests.support.steps import step_program, two_layers

X = [torch.tensor(0.5 + 0.1 * number) for number in range(4)]


def fetches(program: Program) -> list[int]:
    return [position for position, node in enumerate(program.ops()) if ops.is_page_in(node)]


def updates(program: Program) -> list[int]:
    return [position for position, node in enumerate(program.ops()) if ops.is_paged_update(node)]


def fetched(lead: int = 4) -> tuple[Program, Program]:
    """A step with three parameters before and after the pass, proved on numbers."""
    program = paged_step_program(Tensors((300,), (50,), (7,)), X[0], optim.AdamW(lr=1e-2))
    after, record = run_pass(PrefetchState(lead), program)
    assert record.changes == 3
    return program, after


def test_each_update_takes_its_first_range_from_a_fetch_ahead_of_it():
    before, after = fetched()
    assert fetches(before) == []
    nodes = after.ops()
    for fetch, update in zip(fetches(after), updates(after), strict=True):
        assert fetch < update
        assert nodes[update].args[8] is nodes[fetch] and nodes[update].args[2] is nodes[fetch].args[0]


@pytest.mark.parametrize("lead", [1, 4, 1000])
def test_a_fetch_starts_neither_in_the_forward_part_nor_before_the_update_before_its_own(lead):
    _, after = fetched(lead)
    assert min(fetches(after)) >= forward_end(after)
    starts, ends = fetches(after), updates(after)
    for number in range(1, len(ends)):
        # Right before the update before its own, at the earliest: both are then under way together.
        assert starts[number] > (ends[number - 2] if number > 1 else starts[0])
    if lead == 1:
        assert all(0 < end - start <= 3 for start, end in zip(starts, ends, strict=True))


def test_what_it_costs_is_one_staging_buffer_more_while_an_update_runs():
    before, after = fetched(1000)
    staging = max(node.args[7] for node in before.ops() if ops.is_paged_update(node))
    assert 0 <= plan_memory(after).peak_bytes - plan_memory(before).peak_bytes <= 3 * staging


def test_a_program_without_paged_state_is_left_alone():
    program = step_program(*two_layers())
    after, record = run_pass(PrefetchState(), program)
    assert record.changes == 0 and after.text() == program.text()


def test_a_step_that_is_skipped_leaves_no_fetch_behind():
    model = Tensors((300,), (50,))
    step = compiled(model, optim.AdamW(lr=1e-2, paged=True), clip_grad_norm=1.0)
    step(X[0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(torch.tensor(float("nan")))
    assert step.state.skipped == 1
    assert engine._FLIGHTS == {}
    assert all(torch.equal(value, old) for value, old in zip(model.parameters(), before, strict=True))
    step(X[1])
    assert not any(torch.equal(value, old) for value, old in zip(model.parameters(), before, strict=True))
