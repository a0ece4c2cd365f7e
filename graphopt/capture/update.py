"""The whole step: clipping and the optimizer's rule appended to a joint Program, as operators over explicit state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.capture.accumulation import WINDOW, WINDOW_WEIGHT, window_evidence_spec, window_scalar_spec, window_spec
from graphopt.capture.appender import Appender
from graphopt.capture.fp8_scaling import append_history, evidence_of
from graphopt.capture.loss_scaling import (
    GOOD_UPDATES,
    LOSS_SCALE,
    OVERFLOW,
    ScaledGradients,
    ScalingWriter,
    good_updates_spec,
    loss_scale_spec,
)
from graphopt.capture.parameter_update import GradientSource, ParameterWriter
from graphopt.capture.range_update import PAGES, RangeRule, append_paged_update, range_program
from graphopt.capture.trace import new_fake_mode
from graphopt.capture.update_bucket import UpdateBucket
from graphopt.ir import ops
from graphopt.ir.fp8_watch import FP8_EVIDENCE, WINDOW_EVIDENCE
from graphopt.ir.origin import Origin
from graphopt.ir.program import GraphHolder, Program, Stage
from graphopt.ir.spec import InputKind, OutputKind, Signature, TensorSpec
from graphopt.ir.update_targets import update_targets
from graphopt.loss_scale import LossScale
from graphopt.optim.base import Optimizer

aten = torch.ops.aten

GRAD_NORM = "graphopt.grad_norm"  # a name no user output can have by accident
CLIP_SCALAR = "clip_grad_norm"
# torch.nn.utils.clip_grad_norm_ adds this to the norm before it divides.
_CLIP_EPSILON = 1e-6
_WRITTEN_BY_THE_RULE = (OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE)


@dataclass(frozen=True)
class UpdateRequest:
    """What to append: the optimizer, its buckets, whether to clip, how the loss was scaled.

    ``selects``: whether the program itself keeps old values where the update must not be applied. ``watches_fp8``:
    whether micro-steps may quantize to FP8, and leave evidence of what was not finite.
    """

    optimizer: Optimizer
    buckets: tuple[UpdateBucket, ...]
    clip: bool
    loss_scale: LossScale | None = None
    selects: bool = False
    watches_fp8: bool = False


def append_update(joint: Program, request: UpdateRequest) -> Program:
    """The step Program: gradients of ``joint`` go into the update and are no outputs any more."""
    program = joint.copy()
    program.stage = Stage.STEP
    gradients = {
        output.name: program.output_values()[position]
        for position, output in joint.signature.outputs_of(OutputKind.GRAD)
    }
    kept = [
        (value, output)
        for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
        if output.kind is not OutputKind.GRAD
    ]
    program.set_outputs([value for value, _ in kept], [output for _, output in kept])
    _UpdateAppender(program).update(gradients, request, evidence=evidence_of(program))
    program.finish()
    return program


def window_update_program(parameters: Mapping[str, TensorSpec], request: UpdateRequest, *, divide: bool) -> Program:
    """The step Program that ends an accumulation window: window gradients, over their weight, into the update."""
    program = _empty_program()
    appender = _UpdateAppender(program)
    for name, spec in parameters.items():
        appender.add_tensor(name, InputKind.PARAM, spec)
    weight = appender.add_tensor(WINDOW_WEIGHT, InputKind.STATE, window_scalar_spec(next(iter(parameters.values()))))
    gradients = {
        name: appender.add_tensor(f"{WINDOW}.{name}", InputKind.STATE, window_spec(spec))
        for name, spec in parameters.items()
    }
    evidence = appender.add_window_evidence(weight) if request.watches_fp8 else None
    appender.update(gradients, request, weight=weight if divide else None, evidence=evidence)
    program.finish()
    return program


def range_update_program(rule: RangeRule) -> Program:
    """The step Program that updates one range of a parameter; see ``range_program``."""
    return range_program(rule, _empty_program())


class _UpdateAppender(Appender):
    """Appends clipping, unscaling and the rule of the optimizer."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.scaling = ScalingWriter(program, self.emit)
        self.is_scaled = False  # whether gradients are those of a scaled loss
        self.norm: fx.Node | None = None  # of all gradients, where they are clipped

    def update(
        self,
        gradients: Mapping[str, fx.Node],
        request: UpdateRequest,
        *,
        weight: fx.Node | None = None,
        evidence: fx.Node | None = None,
    ) -> None:
        """Append clipping and the rule; ``weight``: what the gradients are first divided by (a window's).

        ``evidence``: f32[], NaN if something was quantized that is not finite.
        """
        scaled = None if request.loss_scale is None else self._look_at_scaled(gradients)
        factor = self._clip_factor(gradients, weight, scaled) if request.clip else None
        if scaled is not None and factor is None:
            weight = self.scaling.divisor(scaled, weight)
        if evidence is not None:
            factor, weight = self._poisoned(factor, weight, evidence)
        applied = None
        if request.selects and (scaled is not None or evidence is not None):
            applied, factor, weight = self._decide(factor, weight, evidence)
        writer = ParameterWriter(self.program, self.emit, request.optimizer)
        for bucket in request.buckets:
            numbers = {name: self.add_number(f"{name}.{bucket.name}") for name in bucket.numbers}
            for name in bucket.parameters:
                self.origin = Origin(name, type(request.optimizer).__name__)
                self._update_parameter(name, self._source(gradients[name], factor, weight), numbers, bucket, writer)
        if evidence is not None:
            self._append_history(evidence, scaled)
        if applied is not None:
            self._select(applied)
        if applied is not None and scaled is not None and request.loss_scale is not None:
            self._append_scale(applied, scaled, request.loss_scale)

    def _look_at_scaled(self, gradients: Mapping[str, fx.Node]) -> ScaledGradients:
        self.origin = Origin("", "loss_scale")
        self.is_scaled = True
        spec = self.program.spec(next(iter(gradients.values())))
        scale = self.add_tensor(LOSS_SCALE, InputKind.STATE, loss_scale_spec(spec))
        scaled = self.scaling.measure(gradients.values(), scale)
        # The number that every update is computed from, not a flag beside it: it is there before any is written.
        self.add_output(scaled.nothing, OutputKind.USER, OVERFLOW)
        return scaled

    def add_window_evidence(self, like: fx.Node) -> fx.Node:
        """The evidence of a whole window, as an input and an output; ``like`` lies on its device."""
        spec = window_evidence_spec(self.program.spec(like))
        evidence = self.add_tensor(WINDOW_EVIDENCE, InputKind.STATE, spec)
        # Not the input itself, which is cleared before anybody may have asked.
        self.origin = Origin("", "fp8")
        self.add_output(self.emit(aten.clone.default, evidence), OutputKind.USER, FP8_EVIDENCE)
        return evidence

    def _poisoned(
        self, factor: fx.Node | None, weight: fx.Node | None, evidence: fx.Node
    ) -> tuple[fx.Node | None, fx.Node | None]:
        """``factor`` or ``weight``, NaN if ``evidence`` is: no update can come before all tensors have been seen."""
        self.origin = Origin("", "fp8")
        if factor is None and weight is not None:
            return None, self.emit(aten.add.Tensor, weight, evidence)
        if factor is not None:
            return self.emit(aten.add.Tensor, factor, evidence), weight
        return self.emit(aten.add.Scalar, evidence, 1.0), None

    def _decide(
        self, factor: fx.Node | None, weight: fx.Node | None, evidence: fx.Node | None
    ) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
        """Whether the update is applied (bool[]), and ``factor`` or ``weight`` such that it is NaN if not.

        It is not if a gradient, the norm or a quantized tensor is not finite, or if a window holds nothing.
        """
        self.origin = Origin("", "loss_scale" if evidence is None else "fp8")
        if factor is None:
            assert weight is not None, "what is decided about is part of the weight"
            nothing, applied = self.scaling.finiteness(self.emit(aten.reciprocal.default, weight))
            return applied, None, self.emit(aten.add.Tensor, weight, nothing)
        decisive = factor if self.norm is None else self.norm
        if evidence is not None and self.norm is not None:
            decisive = self.emit(aten.add.Tensor, self.norm, evidence)
        nothing, applied = self.scaling.finiteness(decisive)
        return applied, self.emit(aten.add.Tensor, factor, nothing), weight

    def _append_history(self, evidence: fx.Node, scaled: ScaledGradients | None) -> None:
        """Let histories move if this update counts. Behind all it depends on: they are written with the update."""
        self.origin = Origin("", "fp8")
        gate = evidence
        if self.norm is not None:
            gate = self.emit(aten.add.Tensor, gate, self.scaling.finiteness(self.norm)[0])
        if scaled is not None:
            gate = self.emit(aten.add.Tensor, gate, scaled.nothing)
        append_history(self.program, self.emit, gate)

    def _select(self, applied: fx.Node) -> None:
        """Let every update be the old value unless ``applied``."""
        values = list(self.program.output_values())
        for update in update_targets(self.program):
            if update.value is update.target or _takes_factor(update.value):
                continue
            self.origin = Origin(update.output.name, "loss_scale")
            # Behind the new value of a parameter or its state, so that those of all are not alive together; buffers
            # were computed before it was known whether they are to be kept.
            self.anchor = update.value.next if update.output.kind in _WRITTEN_BY_THE_RULE else None
            values[update.position] = self.emit(aten.where.self, applied, update.value, update.target)
        self.anchor = None
        self.program.set_outputs(values, self.program.signature.outputs)

    def _append_scale(self, applied: fx.Node, scaled: ScaledGradients, options: LossScale) -> None:
        """Append the next scale of the loss."""
        if not options.dynamic:
            return
        self.origin = Origin("", "loss_scale")
        spec = good_updates_spec(self.program.spec(scaled.scale))
        good = self.add_tensor(GOOD_UPDATES, InputKind.STATE, spec)
        scale, count = self.scaling.next_scale(scaled, good, applied, options)
        self.add_output(scale, OutputKind.STATE_UPDATE, LOSS_SCALE)
        self.add_output(count, OutputKind.STATE_UPDATE, GOOD_UPDATES)

    def _source(self, gradient: fx.Node, factor: fx.Node | None, weight: fx.Node | None) -> GradientSource:
        # Scaled one by one, where it is used: never all gradients twice.
        return GradientSource(
            gradient,
            scaled=lambda node: self._scaled(node, factor, weight),
            factor=lambda: self._single_factor(factor, weight),
            scalar=weight if factor is None else factor,
            divides=factor is None and weight is not None,
            widens=self.is_scaled,
        )

    def _scaled(self, gradient: fx.Node, factor: fx.Node | None, weight: fx.Node | None) -> fx.Node:
        if self.is_scaled:
            gradient = self.scaling.widened(gradient)
        if factor is not None:
            return self.emit(aten.mul.Tensor, gradient, factor)
        return gradient if weight is None else self.emit(aten.div.Tensor, gradient, weight)

    def _single_factor(self, factor: fx.Node | None, weight: fx.Node | None) -> fx.Node | None:
        """What gradients are multiplied by, as one float32."""
        if factor is None and weight is not None:
            factor = self.emit(aten.reciprocal.default, weight)
        if factor is not None and self.program.spec(factor).dtype != torch.float32:
            factor = self.emit(aten._to_copy.default, factor, dtype=torch.float32)
        return factor

    def _update_parameter(
        self,
        name: str,
        source: GradientSource,
        numbers: Mapping[str, fx.Node],
        bucket: UpdateBucket,
        writer: ParameterWriter,
    ) -> None:
        if bucket.is_paged:
            rule = (writer.optimizer, bucket)
            result = append_paged_update(self.program, self.emit, name, source, numbers, rule, self._pages_of(name))
        else:
            specs = bucket.state_specs(self.program.spec(self.program.input_named(name)))
            state = {key: self.add_tensor(f"{key}.{name}", InputKind.STATE, spec) for key, spec in specs.items()}
            result = writer.update(name, source, state, numbers, bucket)
        self.add_output(result.parameter, OutputKind.PARAM_UPDATE, name)
        for key, value in result.state.items():
            self.add_output(value, OutputKind.STATE_UPDATE, f"{key}.{name}")

    def _pages_of(self, name: str) -> Callable[[TensorSpec], fx.Node]:
        return lambda spec: self.add_tensor(f"{PAGES}.{name}", InputKind.STATE, spec, is_far=True)

    def _clip_factor(
        self, gradients: Mapping[str, fx.Node], weight: fx.Node | None, scaled: ScaledGradients | None
    ) -> fx.Node:
        """What clipping multiplies every gradient with, operator for operator as ``torch.nn.utils.clip_grad_norm_``.

        With a window's ``weight`` the norm is that of the mean, and the factor divides by the weight as well. Of
        ``scaled`` gradients the norm is that of the unscaled ones, and the factor divides by the scale as well.
        """
        self.origin = Origin("", "clip_grad_norm")
        limit = self.add_number(CLIP_SCALAR)
        norms = [self._norm(gradient) for gradient in gradients.values()]
        total = self.emit(aten.linalg_vector_norm.default, self.emit(aten.stack.default, norms), 2.0)
        if scaled is not None:
            total = self.scaling.unscaled_norm(total, scaled)
        if weight is not None:
            total = self.emit(aten.div.Tensor, total, weight)
        self.norm = total
        self.add_output(total, OutputKind.USER, GRAD_NORM)
        inverse = self.emit(aten.reciprocal.default, self.emit(aten.add.Tensor, total, _CLIP_EPSILON))
        factor = self.emit(aten.clamp.default, self.emit(aten.mul.Tensor, inverse, limit), None, 1.0)
        if scaled is not None:
            weight = self.scaling.divisor(scaled, weight)
        return factor if weight is None else self.emit(aten.div.Tensor, factor, weight)

    def _norm(self, gradient: fx.Node) -> fx.Node:
        if self.is_scaled:
            return self.scaling.norm(gradient)
        return self.emit(aten.linalg_vector_norm.default, gradient, 2.0)


def _takes_factor(value: fx.Node) -> bool:
    """Whether ``value`` comes from an operator that writes nothing by itself where its factor is not finite."""
    source = value.args[0] if ops.is_getitem(value) else value
    op = ops.overload(source) if isinstance(source, fx.Node) else None
    return op is not None and any(argument.name == "factor" for argument in op._schema.arguments)


def _empty_program() -> Program:
    graph = fx.Graph()
    graph.output(())
    program = Program(GraphHolder(torch.nn.Module(), graph), Signature((), ()), stage=Stage.STEP)
    program.default_fake_mode = new_fake_mode()
    return program
