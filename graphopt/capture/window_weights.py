"""Weights quantized once for a window: what depends on parameters alone, out of the joint Program into one of its own.

The small program runs when a window is opened. Its results, codes and scales, are state for the micro-steps: 1 byte an
element of each weight and layout, until the window is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphopt.capture.appender import Appender
from graphopt.capture.fp8_scaling import advanced_history, weight_amax
from graphopt.capture.fp8_tensors import depends_on_parameters_alone
from graphopt.ir import ops
from graphopt.ir.erase import erase_dead
from graphopt.ir.fp8_codes import is_quantize
from graphopt.ir.fp8_watch import HELD_WEIGHT, WEIGHT_HISTORY, Fp8Watch
from graphopt.ir.origin import Origin
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, Signature

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitWeights:
    """``weights`` gives HELD_WEIGHT outputs, which are inputs of ``joint``, and the next WEIGHT_HISTORY (Delayed)."""

    weights: Program
    joint: Program


def split_weights(joint: Program) -> SplitWeights | None:
    """``joint`` with what quantizes its weights apart; None if it quantizes none."""
    held = _held_values(joint)
    if not held:
        return None
    return SplitWeights(_weights_program(joint, held), _without_weights(joint, held))


def _held_values(program: Program) -> tuple[str, ...]:
    """Names of the values that are handed over: made from quantized weights, read by what is not; never a view."""
    fixed = depends_on_parameters_alone(program)
    sources = [node for node in program.ops() if node in fixed and is_quantize(node)]
    hoisted = set(sources)
    for node in program.ops():
        if node in fixed and not hoisted.isdisjoint(node.all_input_nodes):
            hoisted.add(node)
    found: dict[str, None] = {}
    for node in program.ops():
        if node in hoisted and any(user not in hoisted for user in node.users):
            found[ops.behind_views(node).name] = None
    return tuple(found)


def _weights_program(joint: Program, held: Iterable[str]) -> Program:
    program = joint.copy()
    program.stage = Stage.STEP
    nodes = {node.name: node for node in program.graph.nodes}
    watch = program.fp8.watch
    values = [nodes[name] for name in held]
    names = [f"{HELD_WEIGHT}.{i}" for i in range(len(values))]
    if watch.delayed_weights:
        values.append(_next_history(program))
        names.append(WEIGHT_HISTORY)
    outputs = [Output(name, OutputKind.USER, program.spec(value)) for name, value in zip(names, values, strict=True)]
    program.set_outputs(values, outputs)
    # All calls: what has an effect belongs to the micro-steps.
    for node in reversed(program.ops()):
        program.erase_if_unused(node)
    _drop_inputs(program, lambda entry: True)
    program.fp8 = replace(program.fp8, watch=Fp8Watch(delayed_weights=watch.delayed_weights))
    _number_calls(program)
    program.finish()
    return program


def _next_history(program: Program) -> fx.Node:
    appender = Appender(program)
    appender.origin = Origin("", "fp8")
    history, amax = program.input_named(WEIGHT_HISTORY), weight_amax(program)
    nothing = appender.emit(aten.sum.default, appender.emit(aten.sub.Tensor, amax, amax))
    counts = appender.emit(aten.eq.Scalar, nothing, 0)
    rows = len(program.fp8.watch.delayed_weights)
    moved = advanced_history(appender.emit, history, appender.emit(aten.slice.Tensor, amax, 0, 0, rows))
    return appender.emit(aten.where.self, counts, moved, history)


def _without_weights(joint: Program, held: Iterable[str]) -> Program:
    program = joint.copy()
    nodes = {node.name: node for node in program.graph.nodes}
    for position, name in enumerate(held):
        node = nodes[name]
        entry = Input(f"{HELD_WEIGHT}.{position}", InputKind.STATE, program.spec(node))
        place = program.add_input(entry, node.meta["val"], name=f"s_{HELD_WEIGHT}_{position}")
        node.replace_all_uses_with(place)
        erase_dead(program, (node,))
    _drop_inputs(program, lambda entry: entry.name == WEIGHT_HISTORY)
    program.fp8 = replace(program.fp8, watch=replace(program.fp8.watch, delayed_weights=()))
    program.refresh()
    program.finish()
    return program


def _drop_inputs(program: Program, may_go: Callable[[Input], bool]) -> None:
    """Drop the unused ones among the inputs that may go."""
    inputs = []
    for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True):
        if node.users or not may_go(entry):
            inputs.append(entry)
        else:
            program.graph.erase_node(node)
    program.signature = Signature(tuple(inputs), program.signature.outputs)


def _number_calls(program: Program) -> None:
    """Name calls by their position alone: programs of two batch shapes then have the same text, and are one."""
    for prefix in ("renamed_", "w_"):  # twice, so that no new name meets an old one
        for position, node in enumerate(program.ops()):
            origin = program.origins.pop(node.name, Origin())
            node._rename(f"{prefix}{position}")
            program.origins[node.name] = origin
