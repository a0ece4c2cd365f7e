"""Whether a saved state fits a parameter: every tensor's shape and dtype, codes with their scales and their meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import StateError
from graphopt.ir.spec import TensorSpec
from graphopt.optim.kept_state import MASTER, REMAINDER, STEP, UPDATED, KeptState
from graphopt.optim.state import scale_name

_CODES = (torch.int8, torch.uint8)
_CARRY_OVER = "or carry it over with graphopt.optim.import_state(step, saved_step.optimizer.state_dict())"
_HOW_TO_MATCH = f"compile with the optimizer, options and precision that it was saved with, {_CARRY_OVER}"


def check_state(
    name: str,
    values: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    possible: Sequence[KeptState],
    *,
    counts_steps: bool,
) -> KeptState:
    """Which of the ``possible`` ways to keep the state of the parameter ``name`` the saved ``values`` follow.

    ``record``: what was saved about the meaning of codes. Raises StateError, about the first way, if they fit none.
    """
    problems = []
    for kept in possible:
        problem = _problem(name, values, record, kept, counts_steps=counts_steps)
        if problem is None:
            return kept
        problems.append(problem)
    raise StateError(problems[0])


def _problem(
    name: str, values: Mapping[str, Any], record: Mapping[str, Any] | None, kept: KeptState, *, counts_steps: bool
) -> str | None:
    """Why ``values`` are not kept like ``kept``; None if they are."""
    if not values:
        return None
    problems = [
        *(_tensor_problem(name, key, spec, values, kept) for key, spec in kept.specs.items()),
        *(_extra_problem(name, key, values, kept) for key in values if key not in kept.specs),
        _record_problem(name, record, kept),
        _step_problem(name, values) if counts_steps else None,
    ]
    return next((problem for problem in problems if problem is not None), None)


def _tensor_problem(name: str, key: str, spec: TensorSpec, values: Mapping[str, Any], kept: KeptState) -> str | None:
    value = values.get(key)
    codes = key.removesuffix(scale_name(""))
    if not isinstance(value, torch.Tensor):
        if codes != key and codes in values:
            return f"the state of {name!r} has 8-bit codes {codes}, but no {key} to read them with: it was cut short"
        return f"the state of {name!r} has no {key}, there are {sorted(values)}: {_HOW_TO_MATCH}"
    came = TensorSpec.of(value)
    if codes != key and came.dtype == spec.dtype and came.shape != spec.shape:
        assert kept.block_format is not None, "only state by blocks has scales"
        return (
            f"{key} of {name!r} is {came}; blocks of {kept.block_format.block} elements need {spec}: compile with the "
            f"block size that the state was made with, {_CARRY_OVER}"
        )
    if came.shape != spec.shape:
        return f"state {key} of {name!r} has shape {list(came.shape)}, the parameter needs {list(spec.shape)}"
    if came.dtype != spec.dtype:
        return f"state {key} of {name!r} is {came}, this step keeps {spec} ({kept.label}): {_HOW_TO_MATCH}"
    return None


def _extra_problem(name: str, key: str, values: Mapping[str, Any], kept: KeptState) -> str | None:
    """A moment that the options of now do not use stays (momentum that was switched off); all else is refused."""
    value = values[key]
    if key in (STEP, UPDATED) or not isinstance(value, torch.Tensor):
        return None
    codes = key.removesuffix(scale_name(""))
    if codes != key and codes not in values:
        return f"the state of {name!r} has {key} without the codes that it scales: it was cut short"
    if key in (MASTER, REMAINDER) or value.dtype in _CODES or codes != key:
        return (
            f"the state of {name!r} has {key}, {TensorSpec.of(value)}, which this step does not keep: {_HOW_TO_MATCH}"
        )
    if value.shape != torch.Size(kept.parameter.shape):
        return f"state {key} of {name!r} has shape {list(value.shape)}, the parameter {list(kept.parameter.shape)}"
    return None


def _record_problem(name: str, record: Mapping[str, Any] | None, kept: KeptState) -> str | None:
    expected = kept.record()
    if expected is None:
        return None
    if record is None:
        return (
            f"the state of {name!r} has 8-bit codes, but nothing says what they mean (block, map, order of memory): "
            "save it with step.state_dict() or step.optimizer.state_dict(), whole"
        )
    for key in ("block", "map"):
        if record.get(key) != expected[key]:
            return (
                f"the 8-bit state of {name!r} was made with {key}={record.get(key)!r}, this step reads "
                f"{key}={expected[key]!r}: compile with {key}={record.get(key)!r}, {_CARRY_OVER}"
            )
    if list(record.get("order", ())) != expected["order"]:
        return (
            f"the 8-bit state of {name!r} has its blocks along dimensions {record.get('order')} in memory, the "
            f"parameter lies in memory as {expected['order']}: give the model the memory format that it was saved with"
        )
    return None


def _step_problem(name: str, values: Mapping[str, Any]) -> str | None:
    value = values.get(STEP)
    is_count = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if is_count and float(value) >= 0:  # type: ignore[arg-type]
        return None
    return f"the state of {name!r} has no step count {STEP!r} from 0 on, came {value!r}: it was cut short"
