"""The joint Program: autograd traced through a forward Program, gradients as named outputs.

Private torch: ``setup_stacktrace_preservation_hooks`` of AOTAutograd's logging (torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

from graphopt.capture.origins import write_origins
from graphopt.capture.trace import fake_like, program_from_trace, trace_functional
from graphopt.errors import OutputError
from graphopt.ir.dataflow import depends_on
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, TensorSpec


def differentiate(program: Program, *, roots: Sequence[str], wrt: Sequence[str]) -> Program:
    """The joint Program: ``program`` plus its gradient, with a TANGENT input for each of ``roots``.

    ``roots``: user outputs to differentiate. ``wrt``: parameters or batch inputs; each that the roots reach gets a GRAD
    output of its name, the others get none (their gradient is None, as in eager). Raises OutputError for a root that
    cannot be differentiated or reaches nothing of ``wrt``.
    """
    for root in roots:
        _check_reach(program, root, wrt)
    wanted = set(wrt)
    fakes = _fake_inputs(program, wrt)
    root_positions = [_output_position(program, root) for root in roots]
    tangent_specs = [_tangent_spec(program, position) for position in root_positions]
    sources = [i for i, entry in enumerate(program.signature.inputs) if entry.name in wanted and fakes[i].requires_grad]
    reached: list[int] = []

    def joint(*flat: Any) -> tuple[Any, ...]:
        inputs, tangents = flat[: len(fakes)], flat[len(fakes) :]
        with torch.enable_grad():
            values = _GradientInterpreter(program.module).run(*inputs, enable_io_processing=False)
            results = _without_grad(values)  # here, not behind the gradient: they belong to the forward part
            outputs = [values[position] for position in root_positions]
            _check_differentiable(program, roots, outputs)
            # Lets every backward node carry the sequence number of its own forward node.
            setup_stacktrace_preservation_hooks([output.grad_fn for output in outputs])
            gradients = torch.autograd.grad(
                outputs, [inputs[i] for i in sources], grad_outputs=list(tangents), allow_unused=True
            )
        reached[:] = [i for i, gradient in zip(sources, gradients, strict=True) if gradient is not None]
        return (*results, *(gradient for gradient in gradients if gradient is not None))

    write_origins(program)
    module = trace_functional(joint, [*fakes, *(fake_like(program.fake_mode, spec) for spec in tangent_specs)])
    inputs = [
        *program.signature.inputs,
        *(Input(f"tangent.{root}", InputKind.TANGENT, spec) for root, spec in zip(roots, tangent_specs, strict=True)),
    ]
    outputs = [*program.signature.outputs]
    for i in reached:
        outputs.append(Output(program.signature.inputs[i].name, OutputKind.GRAD, program.signature.inputs[i].spec))
    return _joint_program(module, inputs, outputs, program)


def without_gradient(program: Program, *, wrt: Sequence[str]) -> Program:
    """``program`` as the forward part of its joint Program is: composite operators are the same operators there.

    ``wrt``: as for ``differentiate``; whether an input has a gradient decides how a product is split.
    """

    def forward(*inputs: Any) -> Sequence[Any]:
        with torch.enable_grad():
            return tuple(_without_grad(_GradientInterpreter(program.module).run(*inputs, enable_io_processing=False)))

    write_origins(program)
    module = trace_functional(forward, _fake_inputs(program, wrt))
    return _joint_program(module, program.signature.inputs, program.signature.outputs, program)


def _joint_program(
    module: fx.GraphModule, inputs: Sequence[Input], outputs: Sequence[Output], forward: Program
) -> Program:
    joint = program_from_trace(module, inputs, outputs, stage=Stage.JOINT)
    _name_inputs(joint, forward)
    joint.history = forward.history
    joint.precision = forward.precision
    return joint


class _GradientInterpreter(fx.Interpreter):
    """Runs a forward graph under autograd.

    Some operators (attention with a mask that has a gradient) lay their result out differently under autograd than
    without, where the graph was captured; a view that does not fit that layout copies, as ``reshape`` does in eager.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def differentiable_outputs(program: Program, *, wrt: Sequence[str]) -> tuple[str, ...]:
    """Names of the user outputs of a forward Program that have a gradient with respect to some of ``wrt``."""
    fakes = _fake_inputs(program, wrt)
    with torch.enable_grad(), program.fake_mode:
        values = _GradientInterpreter(program.module).run(*fakes, enable_io_processing=False)
    return tuple(
        output.name
        for position, output in program.signature.outputs_of(OutputKind.USER)
        if values[position].requires_grad
    )


def _fake_inputs(program: Program, wrt: Sequence[str]) -> list[Any]:
    wanted = set(wrt)
    mode = program.fake_mode
    return [
        fake_like(mode, entry.spec, requires_grad=entry.name in wanted and _can_require_grad(entry))
        if isinstance(entry.spec, TensorSpec)
        else 1.0
        for entry in program.signature.inputs
    ]


def _without_grad(values: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value for value in values]


def _can_require_grad(entry: Input) -> bool:
    assert isinstance(entry.spec, TensorSpec)
    return entry.spec.dtype.is_floating_point or entry.spec.dtype.is_complex


def _output_position(program: Program, name: str) -> int:
    for position, output in program.signature.outputs_of(OutputKind.USER):
        if output.name == name:
            return position
    raise OutputError(
        f"no output {name!r}; there are {[o.name for _, o in program.signature.outputs_of(OutputKind.USER)]}"
    )


def _tangent_spec(program: Program, position: int) -> TensorSpec:
    spec = program.signature.outputs[position].spec
    assert isinstance(spec, TensorSpec)
    strides = torch.empty(spec.shape, device="meta").stride()
    return TensorSpec(spec.shape, spec.dtype, tuple(strides), spec.device)


def _check_differentiable(program: Program, roots: Sequence[str], outputs: Sequence[torch.Tensor]) -> None:
    for root, value in zip(roots, outputs, strict=True):
        if not value.requires_grad:
            raise OutputError(
                f"output {root!r} is not differentiable: every path from a trainable parameter to it passes an "
                "operator without a gradient (such as argmax, a comparison, detach or no_grad)"
                f"{_last_cut(program, root)}"
            )


def _last_cut(program: Program, root: str) -> str:
    value = program.output_named(root)
    origin = str(program.origin(value)) if isinstance(value, fx.Node) else ""
    return f"; it is computed at {origin}" if origin else ""


def _check_reach(program: Program, root: str, wrt: Sequence[str]) -> None:
    """Raise OutputError unless some trainable input leads to ``root`` in the graph at all."""
    value = program.output_named(root)
    inputs = zip(program.placeholders(), program.signature.inputs, strict=True)
    wanted = set(wrt)
    if isinstance(value, fx.Node) and depends_on(program, value, [node for node, e in inputs if e.name in wanted]):
        return
    parameters = [entry.name for _, entry in program.signature.inputs_of(InputKind.PARAM)]
    frozen = f"{len(parameters)} parameters, {len([name for name in parameters if name in wanted])} of them trainable"
    raise OutputError(
        f"output {root!r} reaches no trainable parameter (the model has {frozen}): nothing could be trained; "
        "compute it from the model's output, or set requires_grad on a parameter it depends on"
    )


def _name_inputs(joint_program: Program, program: Program) -> None:
    """Give placeholders their readable names back; a trace numbers them."""
    names = [node.name for node in program.placeholders()]
    names += [f"tangent_{i}" for i in range(len(joint_program.placeholders()) - len(names))]
    for node, name in zip(joint_program.placeholders(), names, strict=True):
        node._rename(name)
        node.target = node.name
    joint_program.finish()
