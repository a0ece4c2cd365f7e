"""Policies, budgets and peers as the command line names them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.memory_peers import GRADIENT_CHECKPOINTING, chosen_peers
from benchmarks.memory_settings import checkpoint_settings, memory_settings
from graphopt.checkpoint import EveryN, Offload, Segments, SqrtN
from graphopt.errors import DataError


def test_policies_of_a_list() -> None:
    settings = checkpoint_settings("every-2, segments-3,sqrt-n,sqrt-n+offload")

    policies = [setting.options["checkpoint"] for setting in settings]
    assert policies == [EveryN(2), Segments(3), SqrtN(), SqrtN() + Offload()]
    assert settings[0].name == "EveryN(n=2)"


def test_budgets_are_bytes_or_shares() -> None:
    settings = memory_settings("2GiB,4096,0.8,1/3,1.0")

    budgets = [setting.options["memory"] for setting in settings]
    assert budgets == [2 * 2**30, 4096, Fraction(4, 5), Fraction(1, 3), Fraction(1)]
    assert [type(budget) for budget in budgets] == [int, int, Fraction, Fraction, Fraction]
    assert settings[0].name == "memory=2GiB"


def test_no_list_is_no_setting() -> None:
    assert checkpoint_settings(None) == memory_settings("") == ()


@pytest.mark.parametrize("text", ["every", "every-0", "every-x", "sqrt", "offload-2", "sqrt-n+", "every-1;sqrt-n"])
def test_refuses_what_is_no_policy(text: str) -> None:
    with pytest.raises(DataError, match="every-N"):
        checkpoint_settings(text)


@pytest.mark.parametrize("text", ["0.0", "0", "2XiB", "much", "-1", "1/0"])
def test_refuses_what_is_no_budget(text: str) -> None:
    with pytest.raises(DataError, match="--memory expects"):
        memory_settings(text)


def test_peers_of_a_list() -> None:
    assert list(chosen_peers("checkpointing,compile,compile-1.0,compile-0.5")) == [
        *(GRADIENT_CHECKPOINTING, "torch.compile", "torch.compile budget 0.5")
    ]


@pytest.mark.parametrize("text", ["eager", "compile-2", "compile-nan", "compile-x"])
def test_refuses_what_is_no_peer(text: str) -> None:
    with pytest.raises(DataError, match="compile-SHARE"):
        chosen_peers(text)
