"""Accumulation: the gradients of a micro-batch are added to a window, and so are its loss, weight and evidence."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.capture.appender import Appender
from graphopt.capture.fp8_scaling import append_history, evidence_of
from graphopt.errors import OutputError
from graphopt.ir.fp8_watch import WINDOW_EVIDENCE
from graphopt.ir.origin import Origin
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import InputKind, OutputKind, TensorSpec
from graphopt.ir.update_targets import update_targets

aten = torch.ops.aten

WINDOW = "window"
WINDOW_WEIGHT = "window_weight"
WINDOW_LOSS = "window_loss"


def append_window(joint: Program, *, loss: str, weight: fx.Node | float | None) -> Program:
    """The micro-step Program: gradients are added to the window in at least float32, and die.

    ``weight``: a node of ``joint`` or a number that the micro-batch counts with (None: a sum, no weight at all).
    """
    program = joint.copy()
    program.stage = Stage.STEP
    if isinstance(weight, fx.Node):
        weight = next(node for node in program.graph.nodes if node.name == weight.name)
    appender = _WindowAppender(program)
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


def window_evidence_spec(spec: TensorSpec) -> TensorSpec:
    """The spec of what a window remembers of values that were not finite: one float32 on the parameters' device."""
    return TensorSpec((), torch.float32, (), spec.device)


class _WindowAppender(Appender):
    """Appends what adds one micro-batch to a window."""

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
        self._add_evidence()
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

    def _add_evidence(self) -> None:
        """Add evidence to the window. A micro-batch that is not finite leaves histories and buffers as they were."""
        evidence = evidence_of(self.program)
        if evidence is None:
            return
        self.origin = Origin("", "fp8")
        total = self.add_tensor(WINDOW_EVIDENCE, InputKind.STATE, window_evidence_spec(self.program.spec(evidence)))
        counts = self.emit(aten.eq.Scalar, evidence, 0)
        values = list(self.program.output_values())
        for update in update_targets(self.program):
            if update.output.kind is OutputKind.BUFFER_UPDATE and update.value is not update.target:
                values[update.position] = self.emit(aten.where.self, counts, update.value, update.target)
        self.program.set_outputs(values, self.program.signature.outputs)
        self.add_output(self.emit(aten.add.Tensor, total, evidence), OutputKind.STATE_UPDATE, WINDOW_EVIDENCE)
        append_history(self.program, self.emit, evidence)

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
            self.replace_output(loss, self.emit(aten.masked_fill.Scalar, loss, empty, 0.0))
        self.add_output(self.emit(aten.add.Tensor, total_weight, weight), OutputKind.STATE_UPDATE, WINDOW_WEIGHT)
        self.add_output(self.emit(aten.add.Tensor, total_loss, weighted), OutputKind.STATE_UPDATE, WINDOW_LOSS)
