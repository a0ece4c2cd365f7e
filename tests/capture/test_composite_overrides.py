"""Composite operators are overridden as torch does it, remembered or not, and are afterwards what they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.export.exported_program as exported_program
from torch import nn
from torch._subclasses.fake_impls import op_implementations_dict

from graphopt.capture import composite_overrides
from graphopt.capture.composite_overrides import overrides_remembered

NAME = "_override_composite_implicit_decomp"
ASKED = {torch.ops.aten.linear.default: lambda *args: NotImplemented, torch.ops.aten.einsum.default: len}


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item for each time that torch overrides operators itself; nothing is remembered yet."""
    monkeypatch.setattr(composite_overrides, "_MEMORY", composite_overrides._Memory())
    found: list[Any] = []
    original = getattr(exported_program, NAME)

    @contextmanager
    def counted(asked: Any) -> Iterator[None]:
        found.append(asked)
        with original(asked):
            yield

    monkeypatch.setattr(exported_program, NAME, counted)
    return found


def _states() -> list[Any]:
    return [(dict(operator.py_kernels), op_implementations_dict.get(operator)) for operator in ASKED]


def _inside(asked: Any = ASKED) -> list[Any]:
    with overrides_remembered(), getattr(exported_program, NAME)(asked):
        return _states()


def test_the_second_time_is_as_the_first_and_torch_does_nothing(by_torch):
    before = _states()
    first, between, second = _inside(), _states(), _inside()
    assert first == second != before
    assert before == between == _states()
    assert len(by_torch) == 1


def test_what_is_asked_for_anew_is_done_by_torch(by_torch):
    _inside()
    other = {**ASKED, torch.ops.aten.einsum.default: repr}
    assert _inside(other)[1][0][torch._C.DispatchKey.CompositeImplicitAutograd] is repr
    assert by_torch == [ASKED, other]


def test_an_operator_that_has_another_kernel_since_is_overridden_by_torch(by_torch):
    _inside()
    kernels = torch.ops.aten.linear.default.py_kernels
    kernels[torch._C.DispatchKey.XLA] = len
    try:
        assert _inside()[0][0][torch._C.DispatchKey.XLA] is len
    finally:
        del kernels[torch._C.DispatchKey.XLA]
    assert len(by_torch) == 2


def test_an_error_inside_leaves_operators_and_torch_as_they_were(by_torch):
    _inside()
    before, original = _states(), getattr(exported_program, NAME)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), overrides_remembered(), getattr(exported_program, NAME)(ASKED):
            raise ZeroDivisionError
    assert _states() == before and getattr(exported_program, NAME) is original


def test_a_model_decomposes_alike_with_what_is_remembered(by_torch):
    texts, times = [], []
    for _ in range(3):  # torch itself may find another state the second time than the first in a process
        exported = torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),), strict=False)
        with overrides_remembered():
            texts.append(exported.run_decompositions({}).graph_module.code)
        times.append(len(by_torch))
    assert texts[0] == texts[1] == texts[2] and "aten.linear.default" in texts[0]
    assert times[1] == times[2]
    assert torch.equal(torch.ops.aten.linear.default(torch.ones(1, 2), torch.ones(3, 2)), torch.full((1, 3), 2.0))
