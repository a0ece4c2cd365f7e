"""Run a program that ends in an update, which is applied or skipped as a whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from graphopt.execute.executable import Executable, run_before_commit, run_segment
from graphopt.execute.inputs import write_back
from graphopt.execute.ledger import UpdateFacts, UpdateLedger
from graphopt.execute.verdict import evidence
from graphopt.ir.ambient import plain_execution


@dataclass(frozen=True)
class UpdateRun:
    """An executable, its inputs, and its outputs, which are filled in as they are computed."""

    executable: Executable
    inputs: list[Any]
    outputs: list[Any]


def run_update(
    run: UpdateRun,
    ledger: UpdateLedger,
    *,
    commit: Callable[[], AbstractContextManager[None]],
    facts: Callable[[], UpdateFacts],
) -> None:
    """Run it, and skip the update unless its gradients can be used: seen before ``commit``, or by the program itself.

    ``facts``: what is to be told of the update, once the outputs of the forward part are there.
    """
    with plain_execution():
        if ledger.decides_late:
            _run_deciding(run, ledger, commit, facts)
        else:
            _run_or_skip(run, ledger, commit, facts)


def _run_or_skip(
    run: UpdateRun,
    ledger: UpdateLedger,
    commit: Callable[[], AbstractContextManager[None]],
    facts: Callable[[], UpdateFacts],
) -> None:
    scale = None if ledger.state.scaler is None else float(ledger.state.scaler.scale)
    carried = run_before_commit(run.executable, run.inputs, run.outputs)
    verdict = evidence(run.executable.program, run.outputs, seen=ledger.state.seen).verdict()
    if verdict.skipped is not None:
        carried.clear()
        ledger.skipped(facts(), verdict, scale)
        return
    with commit():
        _write(run, carried)
        ledger.state.pager.store.settle()
        ledger.written(facts())
    ledger.applied(facts(), verdict, scale)


def _run_deciding(
    run: UpdateRun,
    ledger: UpdateLedger,
    commit: Callable[[], AbstractContextManager[None]],
    facts: Callable[[], UpdateFacts],
) -> None:
    """Run a program that itself keeps the old values if its gradients cannot be used; nobody waits for it."""
    scale = None if ledger.state.scaler is None else ledger.state.scaler.scale.clone()
    carried = run_before_commit(run.executable, run.inputs, run.outputs)
    with commit():
        _write(run, carried)
        ledger.state.pager.store.settle()
        found = evidence(run.executable.program, run.outputs, weight=facts().weight, seen=ledger.state.seen)
        ledger.decided_later(facts(), found, scale)
    ledger.hold_schedules()


def _write(run: UpdateRun, carried: list[Any]) -> None:
    run_segment(run.executable.segments[-1], run.inputs, carried, run.outputs)
    write_back(run.executable, run.inputs, run.outputs)
