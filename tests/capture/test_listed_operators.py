"""Operators are looked up once while a program is decomposed, and as before afterwards."""

from __future__ import annotations

import pytest
import torch
import torch._export.utils as export_utils
from torch import nn

import graphopt
from graphopt.capture.listed_operators import operators_listed_once


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each time that torch looks its C++ operators up."""
    found: list[None] = []
    original = export_utils._materialize_cpp_cia_ops

    def counted() -> None:
        found.append(None)
        original()

    monkeypatch.setattr(export_utils, "_materialize_cpp_cia_ops", counted)
    return found


def test_a_capture_looks_operators_up_once(lookups):
    graphopt.capture(nn.Linear(2, 3), (torch.ones(1, 2),), outputs=["output"])
    assert len(lookups) == 1


def test_the_same_operators_are_found(lookups):
    expected = export_utils._collect_all_valid_cia_ops()
    lookups.clear()
    with operators_listed_once():
        assert export_utils._collect_all_valid_cia_ops() == expected
    assert len(lookups) == 1
    export_utils._collect_all_valid_cia_ops()
    assert len(lookups) > 1  # as torch does it


def test_torch_is_left_as_it_was_after_an_error():
    original = export_utils._materialize_cpp_cia_ops
    with pytest.raises(ZeroDivisionError), operators_listed_once():
        raise ZeroDivisionError
    assert export_utils._materialize_cpp_cia_ops is original
