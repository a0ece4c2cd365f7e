"""The whole step: clipping and the optimizer's rule appended to a joint Program, as operators over explicit state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

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
from graphopt.capture.trace import fake_like, new_fake_mode
from graphopt.capture.update_bucket import UpdateBucket
from graphopt.errors import OutputError
from graphopt.ir import ops
from graphopt.ir.origin import Origin
from graphopt.ir.program import GraphHolder, Program, Stage, scalar_input
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, Signature, TensorSpec
from graphopt.ir.update_targets import update_targets
from graphopt.loss_scale import LossScale
from graphopt.optim.base import Optimizer

aten = torch.ops.aten

GRAD_NORM = "graphopt.grad_norm"  # a name no user output can have by accident
CLIP_SCALAR = "clip_grad_norm"
WINDOW = "window"
WINDOW_WEIGHT = "window_weight"
WINDOW_LOSS = "window_loss"
# torch.nn.utils.clip_grad_norm_ adds this to the norm before it divides.
_CLIP_EPSILON = 1e-6
_WRITTEN_BY_THE_RULE = (OutputKind.PARAM_UPDATE, OutputKind.STATE_UPDATE)


@dataclass(frozen=True)
class UpdateRequest:
    """What to append: the optimizer, its buckets, whether to clip, how the loss was scaled.

    ``selects``: whether the program itself keeps old values where the update must not be applied.
    """

    optimizer: Optimizer
    buckets: tuple[UpdateBucket, ...]
    clip: bool
    loss_scale: LossScale | None = None
    selects: bool = False


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
    _Appender(program).update(gradients, request)
    program.finish()
    return program


def window_update_program(parameters: Mapping[str, TensorSpec], request: UpdateRequest, *, divide: bool) -> Program:
    """The step Program that ends an accumulation window: window gradients, over their weight, into the update."""
    program = _empty_program()
    appender = _Appender(program)
    for name, spec in parameters.items():
        appender.add_tensor(name, InputKind.PARAM, spec)
    weight = appender.add_tensor(WINDOW_WEIGHT, InputKind.STATE, window_scalar_spec(next(iter(parameters.values()))))
    gradients = {
        name: appender.add_tensor(f"{WINDOW}.{name}", InputKind.STATE, window_spec(spec))
        for name, spec in parameters.items()
    }
    appender.update(gradients, request, weight=weight if divide else None)
    program.finish()
    return program


def range_update_program(rule: RangeRule) -> Program:
    """The step Program that updates one range of a parameter; see ``range_program``."""
    return range_program(rule, _empty_program())


def append_window(joint: Program, *, loss: str, weight: fx.Node | float | None) -> Program:
    """The micro-step Program: gradients are added to the window in at least float32, and die.

    ``weight``: a node of ``joint`` or a number that the micro-batch counts with (None: a sum, no weight at all).
    """
    program = joint.copy()
    program.stage = Stage.STEP
    if isinstance(weight, fx.Node):
        weight = next(node for node in program.graph.nodes if node.name == weight.name)
    appender = _Appender(program)
    appender.window(loss, weight)
    program.finish()
    return program


def window_spec(spec: TensorSpec) -> TensorSpec:
    """The spec of a gradient window: the parameter's, in at least float32."""
    dtype = torch.promote_types(spec.dtype, torch.float32)
    return TensorSpec(spec.shape, dtype, spec.stride, spec.device)


def window_scalar_spec(spec: TensorSpec) -> TensorSpec:
    """The spec of the window's weight and loss: one float64 on the parameters' device (exact counts to 2^53)."""
    return TensorSpec((), torch.float64, (), spec.device)


class _Appender:
    """Appends inputs, operators and outputs at the end of a Program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.origin = Origin()
        self.anchor: fx.Node | None = None  # where operators go; None: at the end
        self.scaling = ScalingWriter(program, self.emit)
        self.is_scaled = False  # whether gradients are those of a scaled loss

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.program.insert_before(self.anchor or self.program.output_node(), target, *args, **kwargs)
        self.program.origins[node.name] = self.origin
        return node

    def add_tensor(self, name: str, kind: InputKind, spec: TensorSpec, *, is_far: bool = False) -> fx.Node:
        identifier = f"{ {InputKind.PARAM: 'p', InputKind.STATE: 's'}[kind] }_{name.replace('.', '_')}"
        fake = fake_like(self.program.fake_mode, spec)
        return self.program.add_input(Input(name, kind, spec, is_far), fake, name=identifier)

    def add_number(self, name: str) -> fx.Node:
        identifier = name.replace(".", "_")
        # 0.5 keeps every rule finite while values are inferred: no division by zero, no negative root.
        return self.program.add_input(scalar_input(name, InputKind.SCALAR), 0.5, name=identifier)

    def add_output(self, value: fx.Node, kind: OutputKind, name: str) -> None:
        program = self.program
        output = Output(name, kind, program.spec(value))
        program.set_outputs([*program.output_values(), value], [*program.signature.outputs, output])

    def _replace_output(self, value: fx.Node, replacement: fx.Node) -> None:
        program = self.program
        values = [replacement if item is value else item for item in program.output_values()]
        program.set_outputs(values, program.signature.outputs)

    def update(
        self, gradients: Mapping[str, fx.Node], request: UpdateRequest, *, weight: fx.Node | None = None
    ) -> None:
        """Append clipping and the rule; ``weight``: what the gradients are first divided by (a window's)."""
        scaled = None if request.loss_scale is None else self._look_at_scaled(gradients)
        factor = self._clip_factor(gradients, weight, scaled) if request.clip else None
        if scaled is not None and factor is None:
            weight = self.scaling.divisor(scaled, weight)
        applied = None
        if scaled is not None and request.selects:
            applied, factor, weight = self._decide(factor, weight)
        writer = ParameterWriter(self.program, self.emit, request.optimizer)
        for bucket in request.buckets:
            numbers = {name: self.add_number(f"{name}.{bucket.name}") for name in bucket.numbers}
            for name in bucket.parameters:
                self.origin = Origin(name, type(request.optimizer).__name__)
                self._update_parameter(name, self._source(gradients[name], factor, weight), numbers, bucket, writer)
        if applied is not None:
            assert scaled is not None and request.loss_scale is not None, "only a scaled update selects"
            self._select(applied, scaled, request.loss_scale)

    def _look_at_scaled(self, gradients: Mapping[str, fx.Node]) -> ScaledGradients:
        self.origin = Origin("", "loss_scale")
        self.is_scaled = True
        spec = self.program.spec(next(iter(gradients.values())))
        scale = self.add_tensor(LOSS_SCALE, InputKind.STATE, loss_scale_spec(spec))
        scaled = self.scaling.measure(gradients.values(), scale)
        # The number that every update is computed from, not a flag beside it: it is there before any is written.
        self.add_output(scaled.nothing, OutputKind.USER, OVERFLOW)
        return scaled

    def _decide(self, factor: fx.Node | None, weight: fx.Node | None) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
        """Whether the update is applied (bool[]), and ``factor`` or ``weight`` such that it is NaN if not.

        It is not if a gradient or the norm is not finite, or if a window holds nothing.
        """
        self.origin = Origin("", "loss_scale")
        if factor is None:
            assert weight is not None, "the scale is part of the weight"
            nothing, applied = self.scaling.finiteness(self.emit(aten.reciprocal.default, weight))
            return applied, None, self.emit(aten.add.Tensor, weight, nothing)
        nothing, applied = self.scaling.finiteness(self.program.output_named(GRAD_NORM))
        return applied, self.emit(aten.add.Tensor, factor, nothing), weight

    def _select(self, applied: fx.Node, scaled: ScaledGradients, options: LossScale) -> None:
        """Let every update be the old value unless ``applied``, and append the next scale."""
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
        if options.dynamic:
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

    def window(self, loss: str, weight: fx.Node | float | None) -> None:
        self.origin = Origin("", "accumulate")
        program = self.program
        values = dict(zip(program.signature.outputs, program.output_values(), strict=True))
        gradients = {output.name: value for output, value in values.items() if output.kind is OutputKind.GRAD}
        kept = [(value, output) for output, value in values.items() if output.kind is not OutputKind.GRAD]
        program.set_outputs([value for value, _ in kept], [output for _, output in kept])
        if isinstance(weight, fx.Node):
            weight = self._as_scalar(weight)
        self._add_loss(program.output_named(loss), 1.0 if weight is None else weight)
        for name, gradient in gradients.items():
            self.origin = Origin(name, "accumulate")
            spec = window_spec(program.spec(program.input_named(name)))
            window = self.add_tensor(f"{WINDOW}.{name}", InputKind.STATE, spec)
            # Right behind the gradient, which then dies: the window is the only full set of gradients.
            self.anchor = self._behind(gradient, weight)
            if program.spec(gradient).dtype != spec.dtype:
                gradient = self.emit(aten._to_copy.default, gradient, dtype=spec.dtype)
            self.add_output(self._accumulated(window, gradient, weight), OutputKind.STATE_UPDATE, f"{WINDOW}.{name}")
        self.anchor = None

    def _accumulated(self, window: fx.Node, gradient: fx.Node, weight: fx.Node | float | None) -> fx.Node:
        """``window + weight * gradient`` in the window's dtype: a weight in the loss's could overflow in float16.

        A micro-batch of weight 0 adds nothing, even where its gradient is 0 / 0.
        """
        if not isinstance(weight, fx.Node):
            scale = {} if weight is None or weight == 1.0 else {"alpha": weight}
            return self.emit(aten.add.Tensor, window, gradient, **scale)
        dtype = self.program.spec(window).dtype
        factor = weight
        if self.program.spec(weight).dtype != dtype:
            factor = self.emit(aten._to_copy.default, weight, dtype=dtype)
        weighed = self.emit(aten.mul.Tensor, gradient, factor)
        empty = self.emit(aten.eq.Scalar, weight, 0)
        return self.emit(aten.add.Tensor, window, self.emit(aten.masked_fill.Scalar, weighed, empty, 0.0))

    def _as_scalar(self, weight: fx.Node) -> fx.Node:
        spec = self.program.spec(weight)
        if spec.numel != 1:
            raise OutputError(
                f"the weight of a micro-batch is one number, came {spec}: return its sum, or whatever counts the items"
            )
        if not spec.shape:
            return weight
        self.anchor = self._behind(weight)
        scalar = self.emit(aten.reshape.default, weight, [])
        self.anchor = None
        return scalar

    def _behind(self, *values: object) -> fx.Node:
        """The first node behind all of ``values`` and behind the inputs."""
        order = {node: i for i, node in enumerate(self.program.graph.nodes)}
        nodes = [value for value in values if isinstance(value, fx.Node)]
        return max((*nodes, self.program.placeholders()[-1]), key=order.__getitem__).next

    def _add_loss(self, loss: fx.Node, weight: fx.Node | float) -> None:
        """Add weight and weight x loss to the window; a micro-batch of weight 0 has the loss 0, not 0 / 0."""
        spec = window_scalar_spec(self.program.spec(loss))
        total_weight = self.add_tensor(WINDOW_WEIGHT, InputKind.STATE, spec)
        total_loss = self.add_tensor(WINDOW_LOSS, InputKind.STATE, spec)
        scalar = self.emit(aten.reshape.default, loss, []) if self.program.spec(loss).shape else loss
        weighted = self.emit(aten.mul.Tensor, self.emit(aten._to_copy.default, scalar, dtype=spec.dtype), weight)
        if isinstance(weight, fx.Node):
            empty = self.emit(aten.eq.Scalar, weight, 0)
            weighted = self.emit(aten.masked_fill.Scalar, weighted, empty, 0.0)
            self._replace_output(loss, self.emit(aten.masked_fill.Scalar, loss, empty, 0.0))
        self.add_output(self.emit(aten.add.Tensor, total_weight, weight), OutputKind.STATE_UPDATE, WINDOW_WEIGHT)
        self.add_output(self.emit(aten.add.Tensor, total_loss, weighted), OutputKind.STATE_UPDATE, WINDOW_LOSS)


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
