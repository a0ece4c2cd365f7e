"""Updates that would be spoiled by other updates: copies are put in where a value must outlive a write.

Inputs are overwritten when a step succeeds. A value that is really another input (``prev.copy_(cur)`` after folding),
or an input that the backward still reads after the forward's buffers have been written, must be copied before.
"""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program
from graphopt.ir.spec import UPDATE_KINDS, OutputKind, TensorSpec, updated_input_kind
from graphopt.ir.storage import storage_map

aten = torch.ops.aten

_WRITTEN_AFTER_FORWARD = (OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE)


def separate_updates(program: Program) -> int:
    """Copy updates whose value lies in the memory of an input that is itself overwritten; returns how many."""
    storages = storage_map(program)
    targets = _targets(program)
    written = {number for target in targets.values() for number in storages.held[target]}
    values = list(program.output_values())
    count = 0
    for position, target in targets.items():
        value = values[position]
        if value is target or written.isdisjoint(storages.held[value]):
            continue
        if storages.shares(value, target) and _is_same_place(program, value, target):
            continue
        values[position] = _copied_first(program, value)
        count += 1
    if count:
        program.set_outputs(values, program.signature.outputs)
    return count


def updates_parameters(program: Program) -> bool:
    """Whether ``program`` is a step with its update; then buffers are written at its end, behind all readers."""
    return any(True for _ in program.signature.outputs_of(OutputKind.PARAM_UPDATE))


def guarded_inputs(program: Program) -> tuple[fx.Node, ...]:
    """Inputs written after the forward part, which ``protect_backward_reads`` copies if the backward reads them."""
    if updates_parameters(program):
        return ()
    outputs = program.signature.outputs
    return tuple(
        target for position, target in _targets(program).items() if outputs[position].kind in _WRITTEN_AFTER_FORWARD
    )


def protect_backward_reads(program: Program) -> int:
    """Let the backward read copies of inputs that are overwritten between forward and backward; returns how many.

    Only a module without an optimizer writes buffers before its backward runs.
    """
    drop_unused_statistics(program)
    count = 0
    for position, target in _targets(program).items():
        if program.signature.outputs[position].kind not in _WRITTEN_AFTER_FORWARD:
            continue
        if not _is_read_in_backward(program, target):
            continue
        copy = _copied_first(program, target)
        for user in list(target.users):
            if user is not copy and user.op != "output":
                user.replace_input_with(target, copy)
        count += 1
    if count:
        program.refresh()
    return count


def drop_unused_statistics(program: Program) -> None:
    """Training batch normalisation does not read its running statistics in backward, though it is given them."""
    for node in program.ops():
        if ops.is_call(node, aten.native_batch_norm_backward.default) and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _targets(program: Program) -> dict[int, fx.Node]:
    """For each update output by position, the placeholder it is written into."""
    placeholders = program.placeholders()
    found = {}
    for position, output in enumerate(program.signature.outputs):
        if output.kind in UPDATE_KINDS:
            index = program.signature.input_index(output.name, updated_input_kind(output.kind))
            assert index is not None, f"no input to update for output {output.name!r}"
            found[position] = placeholders[index]
    return found


def _is_same_place(program: Program, value: fx.Node, target: fx.Node) -> bool:
    left, right = program.value(value), program.value(target)
    return TensorSpec.of(left) == TensorSpec.of(right) and left.storage_offset() == right.storage_offset()


def _copied_first(program: Program, value: fx.Node) -> fx.Node:
    """A copy of ``value``, made as soon as it exists."""
    anchor = value.next
    if value.op == "placeholder":
        anchor = next(node for node in program.graph.nodes if node.op != "placeholder")
    return program.insert_before(anchor, aten.clone.default, value, origin_of=value)


def _is_read_in_backward(program: Program, target: fx.Node) -> bool:
    storages = storage_map(program)
    numbers = set(storages.held[target])
    return any(
        not numbers.isdisjoint(storages.held[argument])
        for node in program.ops()[forward_end(program) :]
        for argument in node.all_input_nodes
    )
