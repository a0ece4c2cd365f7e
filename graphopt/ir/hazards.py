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
from graphopt.ir.spec import OutputKind, TensorSpec
from graphopt.ir.storage import storage_map
from graphopt.ir.update_targets import update_targets

aten = torch.ops.aten

_WRITTEN_AFTER_FORWARD = (OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE)


def separate_updates(program: Program) -> int:
    """Copy updates whose value lies in the memory of an input that is itself overwritten; returns how many."""
    storages = storage_map(program)
    targets = update_targets(program)
    written = {number for update in targets for number in storages.held[update.target]}
    values = list(program.output_values())
    count = 0
    for update in targets:
        value, target = update.value, update.target
        if value is target or written.isdisjoint(storages.held[value]):
            continue
        if storages.shares(value, target) and _is_same_place(program, value, target):
            continue
        values[update.position] = _copied_first(program, value)
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
    return _written_after_forward(program)


def protect_backward_reads(program: Program) -> int:
    """Let the backward read copies of inputs that are overwritten between forward and backward; returns how many.

    Only a module without an optimizer writes buffers before its backward runs.
    """
    drop_unused_statistics(program)
    count = 0
    for target in _written_after_forward(program):
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


def _written_after_forward(program: Program) -> tuple[fx.Node, ...]:
    return tuple(update.target for update in update_targets(program) if update.output.kind in _WRITTEN_AFTER_FORWARD)


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
