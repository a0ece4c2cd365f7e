"""Bisect: the first pass of a pipeline that breaks its contract or changes numbers beyond what it declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.errors import PassError
from graphopt.ir.numeric import Difference, random_inputs
from graphopt.ir.program import Program
from graphopt.ir.spec import OutputKind
from graphopt.ir.text_diff import text_diff
from graphopt.pipeline.pass_base import Numerics, Pass
from graphopt.pipeline.pipeline import Pipeline, Verify
from graphopt.pipeline.prove import wrong_numbers

_INFINITE = float("inf")
_NUM_DIFFERENCES = 10
_NUM_DIFF_LINES = 30


@dataclass(frozen=True)
class BisectResult:
    """What was found. ``broken`` is the pass as it prints (None: all passes hold), ``position`` counts from 1.

    ``program`` is the last good Program. ``reason``: how the contract was broken. ``differences``: outputs that the
    broken pass changed beyond its declared numerics, lost, or gave another shape or dtype (then the size is infinite).
    ``diff``: the difference of the program texts, cut.
    """

    num_passes: int
    program: Program
    broken: str | None = None
    position: int | None = None
    reason: str = ""
    differences: tuple[Difference, ...] = ()
    diff: str = ""

    def __str__(self) -> str:
        if self.broken is None:
            return f"all {self.num_passes} passes keep their contract and their declared numerics"
        lines = [f"{self.broken} (pass {self.position} of {self.num_passes}) is the first that breaks: {self.reason}"]
        lines += [f"  {difference}" for difference in self.differences[:_NUM_DIFFERENCES]]
        if len(self.differences) > _NUM_DIFFERENCES:
            lines.append(f"  and {len(self.differences) - _NUM_DIFFERENCES} more outputs")
        return "\n".join([*lines, self.diff])


def bisect(program: Program, pipeline: Pipeline, *, inputs: Sequence[Any] | None = None) -> BisectResult:
    """The first pass of ``pipeline`` that does not survive the numeric check; ``program`` is left as it was.

    ``inputs``: numbers in signature order; default: random ones. Each pass is compared with what it was given, so a
    pass answers for its own change alone.
    """
    numbers = random_inputs(program) if inputs is None else inputs
    current = program
    for position, item in enumerate(pipeline, start=1):
        try:
            current = Pipeline((item,)).run(
                current, verify=Verify.NUMERIC, numerics=frozenset(Numerics), inputs=numbers
            )
        except PassError as error:
            broken = _run_again(item, current)
            return BisectResult(
                num_passes=len(pipeline),
                program=current,
                broken=str(item),
                position=position,
                reason=str(error).splitlines()[0].rstrip(":"),
                differences=() if broken is None else tuple(_differences(item, current, broken, numbers)),
                diff="" if broken is None else _cut_diff(current, broken, item.name),
            )
    return BisectResult(len(pipeline), current)


def _run_again(item: Pass, before: Program) -> Program | None:
    """What ``item`` makes of ``before``; None if it raises or leaves what does not even print."""
    after = before.copy()
    try:
        item.apply(after)
        after.finish()
        after.text()
    except Exception:  # the reason that is reported already says so
        return None
    return after


def _differences(item: Pass, before: Program, after: Program, numbers: Sequence[Any]) -> Iterator[Difference]:
    """The outputs that ``after`` lost, then those that it computes differently; the latter only if it runs."""
    kept = [(output.kind, output.name) for output in after.signature.outputs]
    for output in before.signature.outputs:
        if (output.kind, output.name) not in kept:
            yield Difference(output.name, str(output.kind), _INFINITE, _INFINITE, _INFINITE)
    shared = _with_outputs(before, kept)
    if shared is None:
        return
    try:
        found = wrong_numbers(item, shared, after, numbers)
    except Exception:  # a program that breaks the rules of the IR may not run; the reason says why
        return
    yield from found


def _cut_diff(before: Program, after: Program, name: str) -> str:
    lines = text_diff(before.text(), after.text(), "last good", name, context=1).splitlines()
    more = len(lines) - _NUM_DIFF_LINES
    return "\n".join([*lines[:_NUM_DIFF_LINES], *([f"... {more} more lines"] if more > 0 else [])])


def _with_outputs(program: Program, wanted: Sequence[tuple[OutputKind, str]]) -> Program | None:
    """``program`` with only the ``wanted`` outputs, in their order; None if it lacks one of them."""
    outputs = zip(program.output_values(), program.signature.outputs, strict=True)
    by_name = {(output.kind, output.name): (value, output) for value, output in outputs}
    if any(key not in by_name for key in wanted):
        return None
    chosen = [by_name[key] for key in wanted]
    names = [value.name for value, _ in chosen]
    shared = program.copy()
    nodes = {node.name: node for node in shared.graph.nodes}
    shared.set_outputs([nodes[name] for name in names], [output for _, output in chosen])
    shared.finish()
    return shared
