"""Pipeline: an ordered list of passes, and the one place where passes are run, proved, timed and recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from graphopt.errors import PassError, PipelineError, ProgramError
from graphopt.ir.liveness import Workspace, no_workspace, plan_memory, saved_bytes
from graphopt.ir.numeric import differences, random_inputs
from graphopt.ir.program import Program, Stage
from graphopt.ir.text_diff import text_diff
from graphopt.ir.verify import check_functional, check_inference, check_structure
from graphopt.pipeline.parse import parse_passes
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, PassRecord

log = logging.getLogger(__name__)

TRAINING_NUMERICS = frozenset({Numerics.EXACT, Numerics.REASSOCIATES, Numerics.LOSSY})

_MOST_DIFF_LINES = 60  # what fits on a screen or two

# Largest relative error a pass of each class may cause in the numeric check. 1e-4 is 1,000 roundings of float32;
# 0.1 is 25 roundings of bfloat16.
NUMERIC_TOLERANCE = {
    Numerics.EXACT: 0.0,
    Numerics.REASSOCIATES: 1e-4,
    Numerics.LOSSY: 0.1,
    Numerics.DEPLOY: 0.1,
}


class Verify(StrEnum):
    """How much the pipeline proves after each pass; each level includes the ones before it."""

    STRUCTURE = "structure"
    INFER = "infer"
    NUMERIC = "numeric"


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
        level = Verify(verify)
        _check_numerics(self.passes, numerics)
        current = program
        for item in self.passes:
            current = _run_pass(item, current, level=level, inputs=inputs, workspace=workspace, observer=observer)
        return current


def _run_pass(
    item: Pass,
    before: Program,
    *,
    level: Verify,
    inputs: Sequence[Any] | None,
    workspace: Workspace,
    observer: Observer | None,
) -> Program:
    if item.stage != Stage.ANY and item.stage != before.stage:
        raise PipelineError(f"pass {item.name} runs at stage {item.stage}, but this program is at {before.stage}")
    after = before.copy()
    started = time.perf_counter()
    try:
        changes = item.apply(after)
    except ProgramError as error:
        raise _contract_error(item, before, after, str(error)) from error
    except Exception as error:
        raise _contract_error(item, before, after, f"it raised {type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - started
    after.finish()
    _prove(item, before, after, changes, level=level, inputs=inputs)
    record = _record(item, before, after, changes, seconds=seconds, workspace=workspace)
    after.history = (*before.history, record)
    log.info(
        "%s: %d changes, %d ops, peak %d bytes", item.name, changes.count, record.ops_after, record.peak_bytes_after
    )
    if observer is not None:
        observer(PassEvent(before, after, record))
    return after


def _prove(
    item: Pass, before: Program, after: Program, changes: Changes, *, level: Verify, inputs: Sequence[Any] | None
) -> None:
    if not isinstance(changes, Changes):
        raise _contract_error(item, before, after, f"apply must return Changes, not {type(changes).__name__}")
    if after.signature != before.signature:
        raise _contract_error(item, before, after, f"it changed the signature: {_signature_change(before, after)}")
    try:
        check_structure(after)
        if not item.in_place and not _was_in_place(before):
            check_functional(after)
        if level is not Verify.STRUCTURE:
            check_inference(after)
    except ProgramError as error:
        raise _contract_error(item, before, after, str(error)) from error
    unchanged = before.text() == after.text()
    if unchanged != (changes.count == 0):
        said = f"it reports {changes.count} changes, but the text is {'unchanged' if unchanged else 'changed'}"
        raise _contract_error(item, before, after, said)
    if level is Verify.NUMERIC:
        _prove_numbers(item, before, after, inputs)


def _prove_numbers(item: Pass, before: Program, after: Program, inputs: Sequence[Any] | None) -> None:
    numbers = random_inputs(before) if inputs is None else inputs
    found = differences(before, after, numbers, tolerance=NUMERIC_TOLERANCE[Numerics(item.numerics)])
    if found:
        listed = "\n  ".join(map(str, found))
        raise _contract_error(item, before, after, f"it declares {item.numerics}, but numbers differ:\n  {listed}")


def _was_in_place(program: Program) -> bool:
    try:
        check_functional(program)
    except ProgramError:
        return True
    return False


def _record(
    item: Pass, before: Program, after: Program, changes: Changes, *, seconds: float, workspace: Workspace
) -> PassRecord:
    return PassRecord(
        position=len(before.history) + 1,
        name=item.name,
        stage=str(before.stage),
        numerics=str(item.numerics),
        changes=changes.count,
        seconds=seconds,
        ops_before=len(before.ops()),
        ops_after=len(after.ops()),
        peak_bytes_before=plan_memory(before, workspace=workspace).peak_bytes,
        peak_bytes_after=plan_memory(after, workspace=workspace).peak_bytes,
        saved_bytes_before=saved_bytes(before),
        saved_bytes_after=saved_bytes(after),
        refusals=changes.refusals,
    )


def _contract_error(item: Pass, before: Program, after: Program, reason: str) -> PassError:
    try:
        diff = _shortened(text_diff(before.text(), after.text(), "last good", item.name))
    except Exception as error:  # a broken pass may leave a graph that does not even print
        diff = f"(the program after the pass does not print: {error})"
    command = f"graphopt bisect MODEL.py:make --outputs ... --passes '{item}'"
    return PassError(
        f"pass {item.name} broke its contract: {reason}\n"
        f"difference to the last good program:\n{diff}\nto reproduce: {command}"
    )


def _shortened(diff: str) -> str:
    lines = diff.splitlines()
    if len(lines) <= _MOST_DIFF_LINES:
        return diff
    return "\n".join([*lines[:_MOST_DIFF_LINES], f"... {len(lines) - _MOST_DIFF_LINES} more lines"])


def _signature_change(before: Program, after: Program) -> str:
    lost = [o.name for o in before.signature.outputs if o not in after.signature.outputs]
    new = [o.name for o in after.signature.outputs if o not in before.signature.outputs]
    return f"outputs lost {lost}, outputs added {new}" if lost or new else "inputs or their order differ"


def _check_order(passes: tuple[Pass, ...]) -> None:
    for position, item in enumerate(passes):
        later = [other.name for other in passes[position + 1 :] if other.name in item.after]
        if later and not any(other.name in later for other in passes[:position]):
            raise PipelineError(f"pass {item.name} must come after {', '.join(later)}; move it behind")
        if item.in_place and position != len(passes) - 1:
            raise PipelineError(
                f"pass {item.name} writes in place and must be the last; {passes[position + 1].name} follows"
            )


def _check_numerics(passes: tuple[Pass, ...], allowed: frozenset[Numerics]) -> None:
    for item in passes:
        if item.numerics not in allowed:
            raise PipelineError(
                f"pass {item.name} is {item.numerics}: it is for deployment and not allowed in training; "
                f"run it on the trained model instead"
                if item.numerics == Numerics.DEPLOY
                else f"pass {item.name} is {item.numerics}, but only {sorted(allowed)} was asked for"
            )
