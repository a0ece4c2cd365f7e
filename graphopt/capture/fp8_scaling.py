"""What a joint Program is given once its passes have run, if it quantizes to FP8: histories and evidence.

Evidence: a number of each quantized tensor (its largest value, or a scale) and of each gradient that nobody else looks
at, and one number that is NaN if any is Inf or NaN; the step is then skipped. Histories, of delayed scaling: scales
come from a state, and what is seen goes into it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.capture.by_dtype import by_dtype
from graphopt.capture.fp8_delayed import delay, history_scales, is_delayable
from graphopt.capture.fp8_tensors import QuantizedTensor, depends_on_parameters_alone, quantized_tensors
from graphopt.capture.trace import fake_like
from graphopt.fp8 import Delayed, Recipe
from graphopt.ir import ops
from graphopt.ir.fp8_watch import (
    FP8_AMAX,
    FP8_AMAX_BACKWARD,
    FP8_EVIDENCE,
    HISTORY,
    SCALES,
    WEIGHT_HISTORY,
    Fp8Watch,
)
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, TensorSpec
from graphopt.ir.widening import before_widening
from graphopt.optim.base import Emit

aten = torch.ops.aten

_EXTREMES = (aten.amax.default, aten.amin.default)

SCALED_BY_HISTORY = "; scaled by what training has seen of each operand, by its present values where that is nothing"
"""What an evaluation adds to the reason of a product in FP8."""


def watch_step(joint: Program, recipe: Recipe, *, gradients: bool = False) -> Program:
    """``joint``, for a step with its update: FP8_AMAX and FP8_EVIDENCE are outputs, histories (Delayed) are inputs.

    ``gradients``: whether the gradients of parameters are looked at too, as clipping and loss scaling do anyway. Where
    nothing is quantized, nothing is looked at. ``append_history`` lets what was seen go into the histories once it is
    known whether the step counts.
    """
    program = joint.copy()
    tensors = quantized_tensors(program)
    if not tensors:
        return program
    lasting = depends_on_parameters_alone(program)
    weights = tuple(tensor for tensor in tensors if tensor.quantizers[0] in lasting)
    values = tuple(tensor for tensor in tensors if tensor.quantizers[0] not in lasting)
    seen: dict[str, fx.Node] = {}
    delayed: dict[str, tuple[str, ...]] = {}
    for name, members in ((WEIGHT_HISTORY, weights), (HISTORY, values)):
        late = _delayable(members, recipe)
        delayed[name] = tuple(tensor.name for tensor in late)
        if late:
            assert isinstance(recipe, Delayed), "only that recipe has a history"
            spec = TensorSpec((len(late), recipe.history), torch.float32, (recipe.history, 1), _device(program, late))
            history = _add_state(program, name, spec)
            seen |= delay(program, history_scales(program, history, late, recipe, program.ops()[0]), late, recipe)
    for tensor in tensors:
        if tensor.name not in seen:
            seen[tensor.name] = _digest(program, tensor)
    parts = [_stacked(program, [seen[tensor.name] for tensor in part]) for part in (weights, values) if part]
    looked_at = _gradients(program) if gradients else {}
    parts += [_finiteness(program, group) for group in by_dtype(program, looked_at.values())]
    _add_evidence(program, parts)
    names = tuple(tensor.name for tensor in (*weights, *values))
    watch = Fp8Watch(names, tuple(looked_at), delayed=delayed[HISTORY], delayed_weights=delayed[WEIGHT_HISTORY])
    program.fp8 = replace(program.fp8, watch=watch)
    return program


def watch_module(joint: Program, recipe: Recipe) -> Program:
    """``joint``, for a module without an update: with Delayed, SCALES is an input, and the largest values are outputs.

    Those of the forward part are FP8_AMAX, those of the backward part FP8_AMAX_BACKWARD. Whoever runs it keeps the
    histories. What is not finite shows in the gradients, which are NaN.
    """
    program = joint.copy()
    late = _delayable(quantized_tensors(program), recipe)
    if not late:
        return program
    early = set(program.ops()[: forward_end(program)])
    parts = [[tensor for tensor in late if (tensor.quantizers[0] in early) is is_early] for is_early in (True, False)]
    seen = _delay_by_input(program, (*parts[0], *parts[1]), recipe)
    for name, members in zip((FP8_AMAX, FP8_AMAX_BACKWARD), parts, strict=True):
        if members:
            _add_output(program, _stacked(program, [seen[tensor.name] for tensor in members]), name)
    watch = program.fp8.watch
    program.fp8 = replace(program.fp8, watch=replace(watch, reported=watch.delayed))
    return program


def read_history(forward: Program, recipe: Recipe) -> Program:
    """``forward``, which nobody differentiates: with Delayed, SCALES is an input, and the rows say so.

    Nothing that it sees is an output, so that histories stay as they are.
    """
    program = forward.copy()
    late = _delayable(quantized_tensors(program), recipe)
    if late:
        _delay_by_input(program, late, recipe)
        rows = (replace(row, reason=row.reason + SCALED_BY_HISTORY) if row.is_fp8 else row for row in program.fp8.rows)
        program.fp8 = replace(program.fp8, rows=tuple(rows))
    return program


def _delay_by_input(program: Program, late: Sequence[QuantizedTensor], recipe: Recipe) -> dict[str, fx.Node]:
    """Let ``late`` be quantized by SCALES, a new input; by name, the largest absolute value of each, f32[]."""
    assert isinstance(recipe, Delayed), "only that recipe has a history"
    scales = _add_state(program, SCALES, TensorSpec((len(late),), torch.float32, (1,), _device(program, late)))
    names, formats = tuple(tensor.name for tensor in late), tuple(tensor.format for tensor in late)
    program.fp8 = replace(program.fp8, watch=Fp8Watch(delayed=names, formats=formats))
    return delay(program, scales, late, recipe)


def weight_amax(program: Program) -> fx.Node:
    """f32[T], computed from weights alone: what ``watch_step`` has reported of them, which comes first."""
    amax = program.output_named(FP8_AMAX)
    is_joined = ops.is_call(amax, aten.cat.default)
    return amax.args[0][0] if is_joined else amax  # type: ignore[no-any-return]


def append_history(program: Program, emit: Emit, gate: fx.Node) -> None:
    """Let what was seen enter the histories of ``program`` if ``gate`` f32[] is 0; nothing enters if it is NaN."""
    watch = program.fp8.watch
    counts = emit(aten.eq.Scalar, gate, 0)
    for name, rows in ((WEIGHT_HISTORY, watch.delayed_weights), (HISTORY, watch.delayed)):
        if rows and program.signature.input_index(name, InputKind.STATE) is not None:
            history = program.input_named(name)
            moved = advanced_history(emit, history, _rows(program, emit, rows))
            _add_output(program, emit(aten.where.self, counts, moved, history), name, OutputKind.STATE_UPDATE)


def advanced_history(emit: Emit, history: fx.Node, amax: fx.Node) -> fx.Node:
    """``history`` f32[T,H] with ``amax`` f32[T] first and its oldest column gone."""
    length = history.meta["val"].shape[1]
    latest = emit(aten.unsqueeze.default, amax, 1)
    if length == 1:
        return latest
    return emit(aten.cat.default, [latest, emit(aten.slice.Tensor, history, 1, 0, length - 1)], 1)


def evidence_of(program: Program) -> fx.Node | None:
    """The evidence that ``program`` gives, f32[]; None if it quantizes nothing."""
    if not program.fp8.watch.reported:
        return None
    found = program.output_named(FP8_EVIDENCE)
    assert isinstance(found, fx.Node), "the evidence is computed"
    return found


def _delayable(tensors: Sequence[QuantizedTensor], recipe: Recipe) -> tuple[QuantizedTensor, ...]:
    if not isinstance(recipe, Delayed):
        return ()
    return tuple(tensor for tensor in tensors if is_delayable(tensor))


def _device(program: Program, tensors: Sequence[QuantizedTensor]) -> torch.device:
    source = tensors[0].quantizers[0].args[0]
    assert isinstance(source, fx.Node), "a quantizer reads a value"
    return program.spec(source).device


def _add_state(program: Program, name: str, spec: TensorSpec) -> fx.Node:
    return program.add_input(Input(name, InputKind.STATE, spec), fake_like(program.fake_mode, spec), name=f"s_{name}")


def _add_output(program: Program, value: fx.Node, name: str, kind: OutputKind = OutputKind.USER) -> None:
    output = Output(name, kind, program.spec(value))
    program.set_outputs([*program.output_values(), value], [*program.signature.outputs, output])


def _digest(program: Program, tensor: QuantizedTensor) -> fx.Node:
    """f32[], behind the first quantizer of ``tensor``: its scale, or the largest of them; NaN if one is."""
    node = tensor.quantizers[0]
    scale = next((user for user in node.users if ops.is_getitem(user) and user.args[1] == 1), None)
    if scale is None:
        scale = program.insert_before(node.next, ops.getitem, node, 1, origin_of=node)
    if program.spec(scale).numel == 1:
        return program.insert_before(scale.next, aten.view.default, scale, [], origin_of=node)
    return program.insert_before(scale.next, aten.amax.default, scale, origin_of=node)


def _gradients(program: Program) -> dict[str, fx.Node]:
    """The gradients that have elements, by parameter, each as it was computed, those of a dtype together."""
    outputs = zip(program.output_values(), program.signature.outputs, strict=True)
    found = {
        output.name: before_widening(program, value)
        for value, output in outputs
        if output.kind is OutputKind.GRAD and isinstance(value, fx.Node) and program.spec(value).numel
    }
    return dict(sorted(found.items(), key=lambda named: str(program.spec(named[1]).dtype)))


def _finiteness(program: Program, gradients: Sequence[fx.Node]) -> fx.Node:
    """f32[T]: for each of ``gradients``, all of one dtype, 0, or NaN if it holds Inf or NaN."""
    ends = [_stacked(program, [_extreme(program, gradient, end) for gradient in gradients]) for end in _EXTREMES]
    # Each end less itself, in its own dtype: no finite gradient, however large, becomes one that is not.
    nothing = [_behind(program, [end], aten.sub.Tensor, end, end) for end in ends]
    both = _behind(program, nothing, aten.add.Tensor, *nothing)
    if program.spec(both).dtype == torch.float32:
        return both
    return program.insert_before(both.next, aten._to_copy.default, both, dtype=torch.float32)


def _extreme(program: Program, gradient: fx.Node, end: Any) -> fx.Node:
    if program.spec(gradient).dtype.is_complex:
        return program.insert_before(_place_behind(gradient), aten.linalg_vector_norm.default, gradient, math.inf)
    return program.insert_before(_place_behind(gradient), end, gradient)


def _add_evidence(program: Program, parts: Sequence[fx.Node]) -> None:
    """Outputs FP8_AMAX and FP8_EVIDENCE; each part is joined by itself, so that it can be computed apart."""
    amax = parts[0] if len(parts) == 1 else _behind(program, parts, aten.cat.default, list(parts))
    nothing = _behind(program, [amax], aten.sub.Tensor, amax, amax)
    evidence = _behind(program, [nothing], aten.sum.default, nothing)
    _add_output(program, amax, FP8_AMAX)
    _add_output(program, evidence, FP8_EVIDENCE)


def _stacked(program: Program, scalars: Sequence[fx.Node]) -> fx.Node:
    return _behind(program, scalars, aten.stack.default, list(scalars))


def _behind(program: Program, sources: Sequence[fx.Node], target: object, *args: object) -> fx.Node:
    """A call as soon as all of ``sources`` are there."""
    order: Mapping[fx.Node, int] = {node: i for i, node in enumerate(program.graph.nodes)}
    last = max(sources, key=order.__getitem__)
    return program.insert_before(_place_behind(last), target, *args)  # type: ignore[arg-type]


def _place_behind(node: fx.Node) -> fx.Node:
    """What to insert before: ``node`` may be an input (a gradient may be), behind which inputs follow."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place


def _rows(program: Program, emit: Emit, names: Sequence[str]) -> fx.Node:
    """f32[T]: what was seen of ``names``, which follow each other among all that is reported."""
    reported = program.fp8.watch.reported
    places = [reported.index(name) for name in names]
    amax = program.output_named(FP8_AMAX)
    assert isinstance(amax, fx.Node), "what was seen is computed"
    if places == list(range(places[0], places[0] + len(places))):
        return emit(aten.slice.Tensor, amax, 0, places[0], places[-1] + 1)
    return emit(aten.stack.default, [emit(aten.select.int, amax, 0, place) for place in places])
