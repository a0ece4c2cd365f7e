"""Filling a program's inputs at a call, handing out its outputs, writing buffers back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.capture.batch import BoundBatch
from graphopt.capture.loss_scaling import OVERFLOW
from graphopt.capture.update import GRAD_NORM
from graphopt.errors import BatchError
from graphopt.execute.executable import Executable
from graphopt.execute.model_view import ModelView
from graphopt.ir.fp8_watch import FP8_AMAX, FP8_AMAX_BACKWARD, FP8_EVIDENCE
from graphopt.ir.program import Program
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, TensorSpec

_OUR_OWN = frozenset({GRAD_NORM, OVERFLOW, FP8_AMAX, FP8_AMAX_BACKWARD, FP8_EVIDENCE})
"""Outputs of kind USER that a program reports to the step."""


def collect_inputs(
    program: Program,
    view: ModelView,
    bound: BoundBatch | None,
    other: Callable[[Input], Any],
    *,
    tangent: Callable[[TensorSpec], torch.Tensor] | None = None,
) -> list[Any]:
    """All inputs by position: live parameters and buffers, the batch, the rest from ``other``.

    ``tangent`` gives what the gradient of the loss begins with, for its spec (None: ones).
    """
    batch = {} if bound is None else dict(zip(bound.names, bound.tensors, strict=True))
    values: list[Any] = []
    for entry in program.signature.inputs:
        if entry.kind is InputKind.PARAM:
            values.append(view.parameters[entry.name])
        elif entry.kind is InputKind.BUFFER:
            values.append(view.buffers[entry.name])
        elif entry.kind is InputKind.BATCH:
            values.append(batch[entry.name])
        elif entry.kind is InputKind.TANGENT:
            assert isinstance(entry.spec, TensorSpec)
            values.append((tangent or _ones)(entry.spec))
        else:
            values.append(other(entry))
    return values


def asked_outputs(program: Program) -> tuple[tuple[int, Output], ...]:
    """Position and output of what a user asked for, in order."""
    users = program.signature.outputs_of(OutputKind.USER)
    return tuple((i, output) for i, output in users if output.name not in _OUR_OWN)


def user_outputs(program: Program, outputs: Sequence[Any]) -> list[Any]:
    """The outputs a user asked for, in order."""
    return [outputs[i] for i, _ in asked_outputs(program)]


def _ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=spec.dtype, device=spec.device)


def write_back(executable: Executable, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Write buffers and changed batch tensors, which stay as they were until everything has succeeded."""
    placeholders = {node: i for i, node in enumerate(executable.program.placeholders())}
    positions = {value: i for i, value in enumerate(executable.program.output_values())}
    for write in executable.plan.write_at_end:
        inputs[placeholders[write.target]].copy_(outputs[positions[write.value]])


def refuse_aliased(program: Program, bound: BoundBatch) -> None:
    """Raise BatchError if the model writes into batch tensors of which two share memory: the graph knows no overlap."""
    written = [output.name for _, output in program.signature.outputs_of(OutputKind.BATCH_UPDATE)]
    if not written:
        return
    seen: dict[int, str] = {}
    for name, tensor in zip(bound.names, bound.tensors, strict=True):
        if not tensor.numel():
            continue
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen and (name in written or seen[pointer] in written):
            raise BatchError(
                f"batch tensors {seen[pointer]!r} and {name!r} share memory, and the model writes into "
                f"{', '.join(map(repr, written))}: pass clones"
            )
        seen.setdefault(pointer, name)
