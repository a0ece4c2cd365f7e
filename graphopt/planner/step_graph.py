"""A functional Program as integers, for simulations that run hundreds of times."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.hazards import guarded_inputs
from graphopt.ir.in_place import has_in_place_form
from graphopt.ir.liveness import Workspace, forward_end
from graphopt.ir.program import Program, nodes_in
from graphopt.ir.reuse import DyingOperands
from graphopt.ir.spec import UPDATE_KINDS, OutputKind
from graphopt.ir.storage import resident_bytes, storage_map
from graphopt.ir.update_targets import update_targets


@dataclass(frozen=True)
class StepGraph:
    """Nodes (inputs, constants and calls, in order) and storages of a Program by number.

    ``is_call[i]``; ``arguments[i]``: nodes that call i reads; ``held[i]``: storages that node i refers to; ``made[i]``:
    those that it allocates; ``maker[s]``: the node that allocates storage s; ``value[s]``: the node that stands for the
    storage's content; ``resident[s]``: whether it belongs to the caller. ``reusable[i]``: arguments whose memory call i
    can write its result into, if they die there. ``updated[i]``: (storage of a result, argument that it may be written
    into), for calls that write all their results into arguments or none. ``overwritten``: resident storages that the
    step updates in place. ``guarded``: resident storages that are written after the forward part, so that calls that
    run again read a copy. ``returned``: nodes that leave the program; ``writes``: (value, target) of updates written as
    soon as possible. ``first_late``: the first call of the backward part. ``repeatable[i]``: whether running call i
    again gives the same and leaves no trace. ``seconds[i]``: what it costs by the cost model; ``workspace[i]``: bytes
    inside it.
    """

    nodes: tuple[fx.Node, ...]
    is_call: tuple[bool, ...]
    arguments: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    maker: tuple[int, ...]
    value: tuple[int, ...]
    nbytes: tuple[int, ...]
    resident: tuple[bool, ...]
    overwritten: frozenset[int]
    guarded: frozenset[int]
    returned: frozenset[int]
    writes: tuple[tuple[int, int], ...]
    reusable: tuple[tuple[int, ...], ...]
    updated: tuple[tuple[tuple[int, int], ...], ...]
    repeatable: tuple[bool, ...]
    seconds: tuple[float, ...]
    workspace: tuple[int, ...]
    first_late: int
    resident_bytes: int
    index: dict[fx.Node, int] = field(repr=False)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.nodes)

    def early_storages(self) -> tuple[int, ...]:
        """Storages that calls of the forward part allocate, in order."""
        return tuple(s for s, maker in enumerate(self.maker) if maker < self.first_late and not self.resident[s])


def step_graph(program: Program, *, seconds: dict[fx.Node, float], workspace: Workspace) -> StepGraph:
    """The StepGraph of a functional ``program``; ``seconds`` are the costs of its calls."""
    storages = storage_map(program)
    nodes = tuple(node for node in program.graph.nodes if node.op != "output")
    index = {node: i for i, node in enumerate(nodes)}
    maker: dict[int, int] = {}
    value: dict[int, int] = {}
    made: list[tuple[int, ...]] = []
    for i, node in enumerate(nodes):
        fresh = tuple(s for s in storages.held[node] if s not in maker)
        maker.update(dict.fromkeys(fresh, i))
        made.append(fresh)
        if isinstance(node.meta.get("val"), torch.Tensor):
            for s in storages.held[node]:
                value.setdefault(s, i)
    calls = program.ops()
    split = forward_end(program)
    operands = DyingOperands(program, storages)
    return StepGraph(
        nodes=nodes,
        is_call=tuple(node.op == "call_function" for node in nodes),
        arguments=tuple(tuple(index[argument] for argument in node.all_input_nodes) for node in nodes),
        held=tuple(storages.held[node] for node in nodes),
        made=tuple(made),
        maker=tuple(maker[s] for s in range(len(storages.nbytes))),
        value=tuple(value.get(s, maker[s]) for s in range(len(storages.nbytes))),
        nbytes=storages.nbytes,
        resident=tuple(s in storages.resident for s in range(len(storages.nbytes))),
        overwritten=frozenset(operands.written),
        guarded=frozenset(s for node in guarded_inputs(program) for s in storages.held[node]),
        returned=_returned(program, index),
        writes=_writes(program, storages.held, index),
        reusable=tuple(
            tuple(index[operand] for operand in operands.fitting(node) if has_in_place_form(node, operand))
            for node in nodes
        ),
        updated=tuple(
            tuple((storages.held[result][0], index[operand]) for result, operand in operands.updatable(node).items())
            for node in nodes
        ),
        repeatable=_repeatable(nodes, storages.held),
        seconds=tuple(seconds.get(node, 0.0) for node in nodes),
        workspace=tuple(workspace(node) if node.op == "call_function" else 0 for node in nodes),
        first_late=index[calls[split]] if split < len(calls) else len(nodes),
        resident_bytes=resident_bytes(program, storages),
        index=index,
    )


def _repeatable(nodes: tuple[fx.Node, ...], held: dict[fx.Node, tuple[int, ...]]) -> tuple[bool, ...]:
    """Pure calls whose memory no call writes into: neither their result nor what they read would be the same again."""
    written = {s for node in nodes if node.op == "call_function" for a in ops.mutated_arguments(node) for s in held[a]}
    return tuple(
        node.op != "call_function"
        or (ops.is_pure(node) and all(written.isdisjoint(held[other]) for other in (node, *node.all_input_nodes)))
        for node in nodes
    )


def _returned(program: Program, index: dict[fx.Node, int]) -> frozenset[int]:
    """Nodes that are held to the end: outputs, and updates that are written when all has succeeded."""
    late = (OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE)
    return frozenset(
        index[value]
        for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
        if nodes_in((value,)) and (output.kind not in UPDATE_KINDS or output.kind in late)
    )


def _writes(
    program: Program, held: dict[fx.Node, tuple[int, ...]], index: dict[fx.Node, int]
) -> tuple[tuple[int, int], ...]:
    kinds = (OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE)
    return tuple(
        (index[update.value], index[update.target])
        for update in update_targets(program)
        if update.output.kind in kinds
        and update.value.op == "call_function"
        and set(held[update.value]).isdisjoint(held[update.target])
    )
