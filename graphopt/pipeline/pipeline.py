"""Pipeline: an ordered list of passes, and the one place where passes are run, proved, timed and recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphopt.errors import BudgetError, PipelineError, ProgramError, UnsupportedError
from graphopt.ir.liveness import Workspace, no_workspace, plan_memory, saved_bytes
from graphopt.ir.program import Program, Stage
from graphopt.ir.storage import storage_map
from graphopt.pipeline.parse import parse_passes
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, PassRecord
from graphopt.pipeline.prove import Verify, contract_error, prove

log = logging.getLogger(__name__)

TRAINING_NUMERICS = frozenset({Numerics.EXACT, Numerics.REASSOCIATES, Numerics.LOSSY})


@dataclass(frozen=True)
class PassEvent:
    """What an observer sees after a pass: the program before and after, and the record."""

    before: Program
    after: Program
    record: PassRecord


Observer = Callable[[PassEvent], None]


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order they run. ``str`` and ``parse`` are inverses."""

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        _check_order(self.passes)

    @classmethod
    def parse(cls, text: str, *, registry: Mapping[str, type[Pass]] | None = None) -> Pipeline:
        """The Pipeline that ``text`` describes, such as ``"drop-dead,dedupe,recompute{budget=2GiB}"``.

        Raises PipelineError naming the unknown pass or option and what there is.
        """
        return cls(parse_passes(text, registry))

    def __str__(self) -> str:
        return ",".join(str(item) for item in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def at(self, stage: Stage) -> Pipeline:
        """The passes that run at ``stage`` alone (ANY not included)."""
        return Pipeline(tuple(item for item in self.passes if item.stage == stage))

    def without(self, name: str) -> Pipeline:
        """The passes that are not called ``name``."""
        return Pipeline(tuple(item for item in self.passes if item.name != name))

    def run(
        self,
        program: Program,
        *,
        verify: Verify | str = Verify.STRUCTURE,
        numerics: frozenset[Numerics] = TRAINING_NUMERICS,
        inputs: Sequence[Any] | None = None,
        workspace: Workspace = no_workspace,
        observer: Observer | None = None,
    ) -> Program:
        """A new Program with every pass applied and a PassRecord of each in its ``history``.

        ``inputs`` (in signature order) are the numbers for the numeric level; default: random ones. A pass that breaks
        its contract raises PassError; ``program`` is left as it was.
        """
        run = _Run(Verify(verify), inputs, workspace, observer)
        _check_numerics(self.passes, numerics)
        if not self.passes:
            return program
        current = _Known.of(program, program.text(), workspace)
        for item in self.passes:
            current = run.one(item, current)
        return current.program


@dataclass(frozen=True)
class _Known:
    """A program with what the pipeline writes down of it, computed once."""

    program: Program
    text: str
    peak_bytes: int
    saved_bytes: int

    @classmethod
    def of(cls, program: Program, text: str, workspace: Workspace) -> _Known:
        storages = storage_map(program)
        peak = plan_memory(program, workspace=workspace, storages=storages).peak_bytes
        return cls(program, text, peak, saved_bytes(program, storages=storages))


@dataclass(frozen=True)
class _Run:
    """How passes are run: what is proved, on which numbers, with which workspace, who watches."""

    level: Verify
    inputs: Sequence[Any] | None
    workspace: Workspace
    observer: Observer | None

    def one(self, item: Pass, before: _Known) -> _Known:
        """The program after ``item``, proved and recorded."""
        if item.stage != Stage.ANY and item.stage != before.program.stage:
            at = before.program.stage
            raise PipelineError(f"pass {item.name} runs at stage {item.stage}, but this program is at {at}")
        program = before.program.copy()
        started = time.perf_counter()
        try:
            changes = item.prepared(self.workspace).apply(program)
        except ProgramError as error:
            raise contract_error(item, before.program, program, str(error)) from error
        except (BudgetError, UnsupportedError):
            raise  # what the user asked for cannot be done; the pass is not at fault
        except Exception as error:
            raise contract_error(item, before.program, program, f"it raised {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - started
        program.finish()
        after = self._proved(item, before, program, changes)
        record = _record(item, before, after, changes, seconds=seconds)
        program.history = (*before.program.history, record)
        log.info("%s: %d changes, %d ops, peak %d bytes", item.name, changes.count, record.ops_after, after.peak_bytes)
        if self.observer is not None:
            self.observer(PassEvent(before.program, program, record))
        return after

    def _proved(self, item: Pass, before: _Known, program: Program, changes: Changes) -> _Known:
        text = program.text()
        is_unchanged = text == before.text
        prove(
            item,
            before.program,
            program,
            changes,
            is_unchanged=is_unchanged,
            level=self.level,
            inputs=self.inputs,
        )
        if is_unchanged:
            return replace(before, program=program)
        return _Known.of(program, text, self.workspace)


def _record(item: Pass, before: _Known, after: _Known, changes: Changes, *, seconds: float) -> PassRecord:
    return PassRecord(
        position=len(before.program.history) + 1,
        name=item.name,
        stage=str(before.program.stage),
        numerics=str(item.numerics),
        changes=changes.count,
        seconds=seconds,
        ops_before=len(before.program.ops()),
        ops_after=len(after.program.ops()),
        peak_bytes_before=before.peak_bytes,
        peak_bytes_after=after.peak_bytes,
        saved_bytes_before=before.saved_bytes,
        saved_bytes_after=after.saved_bytes,
        refusals=changes.refusals,
    )


def _check_order(passes: tuple[Pass, ...]) -> None:
    for position, item in enumerate(passes):
        later = [other.name for other in passes[position + 1 :] if other.name in item.after]
        if later and not any(other.name in later for other in passes[:position]):
            raise PipelineError(f"pass {item.name} must come after {', '.join(later)}; move it behind")
        functional = next((other.name for other in passes[position + 1 :] if not other.in_place), None)
        if item.in_place and functional is not None:
            raise PipelineError(f"pass {item.name} writes in place and must be the last; {functional} follows")


def _check_numerics(passes: tuple[Pass, ...], allowed: frozenset[Numerics]) -> None:
    for item in passes:
        if item.numerics not in allowed:
            raise PipelineError(
                f"pass {item.name} is {item.numerics}: it is for deployment and not allowed in training; "
                f"run it on the trained model instead"
                if item.numerics == Numerics.DEPLOY
                else f"pass {item.name} is {item.numerics}, but only {sorted(allowed)} was asked for"
            )
