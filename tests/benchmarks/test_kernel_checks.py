"""Kernels checked on the device that is there: all are right, and a wrong one is seen."""

from __future__ import annotations

import torch

from benchmarks.kernel_checks import (
    KernelCase,
    KernelCheckFigures,
    cases,
    check_kernels,
    checks_summary,
)

CPU = torch.device("cpu")


def test_every_kernel_is_right_on_the_cpu() -> None:
    rows = tuple(check_kernels(CPU))
    assert {row.figures.kernel for row in rows} == {"fp8 cast", "fp8 product", "block adam", "block lion"}
    assert [row.figures for row in rows if not row.figures.is_right] == []
    assert checks_summary(rows).row_count == 4


def test_a_wrong_and_a_failing_kernel_are_seen(monkeypatch) -> None:
    def fails() -> int:
        raise ValueError("no such instruction")

    wrong = [
        KernelCase("a", "bits", lambda: 3),
        KernelCase("a", "noise", lambda: 59.0),
        KernelCase("a", "fails", fails),
    ]
    right = [KernelCase("b", "bits", lambda: 0), KernelCase("b", "noise", lambda: 61.0)]
    monkeypatch.setattr("benchmarks.kernel_checks.cases", lambda device: iter([*wrong, *right]))
    figures = [row.figures for row in check_kernels(CPU)]
    assert [found.is_right for found in figures] == [False, False, False, True, True]
    assert figures[2].note == "ValueError: no such instruction"


def test_cases_differ_in_name() -> None:
    names = [(case.kernel, case.name) for case in cases(CPU)]
    assert len(names) == len(set(names)) > 70


def test_a_case_without_a_result_is_not_right() -> None:
    assert not KernelCheckFigures("a", "b").is_right
