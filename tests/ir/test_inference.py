"""Values are inferred again exactly where their operator or what it reads has changed."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from graphopt.errors import ProgramError
from graphopt.ir.program import Program
from graphopt.ir.storage import storage_map
from graphopt.ir.verify import check_inference
from tests.support.graphs import program_of

aten = torch.ops.aten


def _chain() -> Program:
    """exp, a view of it, and two values that read the view."""
    return program_of(lambda x: x.exp().view(6).sin().cos(), torch.randn(2, 3))


def _inferred_again(program: Program, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the nodes whose operator ``refresh`` runs."""
    seen: list[str] = []
    infer = Program.infer
    monkeypatch.setattr(Program, "infer", lambda self, node: (seen.append(node.name), infer(self, node))[1])
    program.refresh()
    return seen


@pytest.mark.parametrize("copied", [False, True])
def test_what_holds_is_not_inferred_again(copied, monkeypatch):
    program = _chain().copy() if copied else _chain()
    assert _inferred_again(program, monkeypatch) == []


def test_a_view_of_what_was_exchanged_shows_the_memory_of_what_stands_there_now(monkeypatch):
    program = _chain()
    exp, view, sin, _ = program.ops()
    made = program.insert_before(view, aten.tanh.default, exp.args[0])
    view.replace_input_with(exp, made)
    assert not storage_map(program).shares(view, made)
    # sin read another value than now, but one of the same facts and with memory of its own: cos need not be run.
    assert _inferred_again(program, monkeypatch) == [view.name, sin.name]
    assert storage_map(program).shares(view, made)


def test_other_facts_go_all_the_way_down():
    program = _chain()
    exp, view, sin, cos = program.ops()
    exp.target, exp.args = aten._to_copy.default, (exp.args[0],)
    exp.kwargs = {"dtype": torch.bfloat16}
    program.refresh()
    assert {program.value(node).dtype for node in (exp, view, sin, cos)} == {torch.bfloat16}


def _reshape_of(value: fx.Node, program: Program) -> fx.Node:
    return program.insert_before(program.output_node(), aten.reshape.default, value, [6])


def test_a_view_that_becomes_a_copy_loses_the_memory_of_its_base():
    program = program_of(lambda x, y: (x.exp(), y.exp().t()), torch.randn(2, 3), torch.randn(3, 2))
    plain, turned = program.output_values()
    reshaped = _reshape_of(plain, program)
    assert storage_map(program).shares(reshaped, plain)
    reshaped.replace_input_with(plain, turned)
    program.refresh()
    shares = storage_map(program).shares
    assert not shares(reshaped, plain)
    assert not shares(reshaped, turned)


@pytest.mark.parametrize("argument", [1, True, 1.0])
def test_an_argument_of_another_value_or_type_is_another_argument(argument):
    program = program_of(lambda x: x.sum(0), torch.randn(2, 3))
    (node,) = program.ops()
    assert program.is_inferred(node)
    node.args = (node.args[0], [argument])
    assert not program.is_inferred(node)


def test_a_value_that_somebody_wrote_is_checked_and_put_right():
    program = _chain()
    sin = program.ops()[2]
    sin.meta["val"] = program.value(program.placeholders()[0])
    with pytest.raises(ProgramError, match=r"recorded as f32\[2,3\], but the operator gives f32\[6\]"):
        check_inference(program)
    program.refresh()
    check_inference(program)


def test_an_operator_that_rejects_what_it_reads_now_is_found():
    program = program_of(lambda x, y: x @ y, torch.randn(2, 3), torch.randn(3, 4))
    (product,) = program.ops()
    product.args = product.args[::-1]
    with pytest.raises(ProgramError, match="rejects its arguments"):
        check_inference(program)
