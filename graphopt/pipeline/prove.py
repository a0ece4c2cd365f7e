"""Proving what a pass claims: structure, signature, change count, inferred values, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from graphopt.errors import PassError, ProgramError
from graphopt.ir.call_by_call import differences_of_calls
from graphopt.ir.numeric import Difference, differences, random_inputs
from graphopt.ir.program import Program
from graphopt.ir.text_diff import text_diff
from graphopt.ir.verify import check_functional, check_inference, check_structure, is_functional
from graphopt.pipeline.pass_base import Changes, Numerics, Pass

_MOST_DIFF_LINES = 60  # what fits on a screen or two

# Largest error a pass of each class may cause in the numeric check, relative to the largest value; all errors together,
# as norms, a quarter of it (``NORM_SHARE``). 1e-4 is 1,000 roundings of float32; 0.1 is 25 roundings of bfloat16.
NUMERIC_TOLERANCE = {
    Numerics.EXACT: 0.0,
    Numerics.REASSOCIATES: 1e-4,
    Numerics.LOSSY: 0.1,
    Numerics.DEPLOY: 0.1,
}


def wrong_numbers(item: Pass, before: Program, after: Program, inputs: Sequence[Any]) -> tuple[Difference, ...]:
    """What ``item`` computes otherwise than it may: outputs; values too, where its numerics are not exact.

    An exact pass is bit-equal. Another one keeps its outputs within its tolerance, or, where the program makes more of
    small errors than that, the result of every call that was given the right numbers.
    """
    tolerance = NUMERIC_TOLERANCE[Numerics(item.numerics)] if item.tolerance is None else item.tolerance
    found = differences(before, after, inputs, tolerance=tolerance)
    if not found or not tolerance or not (is_functional(before) and is_functional(after)):
        return found
    return differences_of_calls(before, after, inputs, tolerance=tolerance)


class Verify(StrEnum):
    """How much the pipeline proves after each pass; each level includes the ones before it."""

    STRUCTURE = "structure"
    INFER = "infer"
    NUMERIC = "numeric"


def prove(
    item: Pass,
    before: Program,
    after: Program,
    changes: Changes,
    *,
    is_unchanged: bool,
    level: Verify,
    inputs: Sequence[Any] | None,
) -> None:
    """Raise PassError unless ``after`` is a well-formed Program that ``item`` may have made of ``before``."""
    if not isinstance(changes, Changes):
        raise contract_error(item, before, after, f"apply must return Changes, not {type(changes).__name__}")
    if after.signature != before.signature:
        raise contract_error(item, before, after, f"it changed the signature: {_signature_change(before, after)}")
    try:
        check_structure(after)
        if not item.in_place and is_functional(before):
            check_functional(after)
        if level is not Verify.STRUCTURE:
            check_inference(after)
    except ProgramError as error:
        raise contract_error(item, before, after, str(error)) from error
    if is_unchanged != (changes.count == 0):
        said = f"it reports {changes.count} changes, but the text is {'unchanged' if is_unchanged else 'changed'}"
        raise contract_error(item, before, after, said)
    if level is Verify.NUMERIC:
        _prove_numbers(item, before, after, inputs)


def _prove_numbers(item: Pass, before: Program, after: Program, inputs: Sequence[Any] | None) -> None:
    numbers = random_inputs(before) if inputs is None else inputs
    found = wrong_numbers(item, before, after, numbers)
    if found:
        listed = "\n  ".join(map(str, found))
        raise contract_error(item, before, after, f"it declares {item.numerics}, but numbers differ:\n  {listed}")


def contract_error(item: Pass, before: Program, after: Program, reason: str) -> PassError:
    """The error of a pass that broke its contract: the reason, the diff to the last good text, how to reproduce it."""
    try:
        diff = _shortened(text_diff(before.text(), after.text(), "last good", item.name))
    except Exception as error:  # a broken pass may leave a graph that does not even print
        diff = f"(the program after the pass does not print: {error})"
    command = f"graphopt bisect MODEL.py:make --outputs ..., with --passes '{item}', or --precision or --fp8 as it was"
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
