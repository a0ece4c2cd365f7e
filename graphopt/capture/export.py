"""From an ``nn.Module`` and one batch to a forward Program: the adapter to ``torch.export`` (torch 2.11 to 2.14)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind as ExportInput
from torch.export.graph_signature import OutputKind as ExportOutput

from graphopt.capture.attribute_names import any_attribute_name
from graphopt.capture.batch import BoundBatch
from graphopt.capture.capture_message import capture_message
from graphopt.capture.composite_overrides import overrides_remembered
from graphopt.capture.copies import broadcast_copies
from graphopt.capture.fake_layouts import correct_fake_layouts
from graphopt.capture.forward_program import ExportedValue, forward_program
from graphopt.capture.grad_mode import inline_grad_mode_regions
from graphopt.capture.hooks import refuse_module_hooks
from graphopt.capture.keyed import StepOutput
from graphopt.capture.listed_operators import operators_listed_once
from graphopt.capture.lost_gradients import refuse_lost_gradients
from graphopt.capture.outputs import Container, OutputSelection, named_leaves, select_outputs, with_loss
from graphopt.capture.quiet_export import quiet_export
from graphopt.capture.side_effects import ModuleStates
from graphopt.capture.trace_guards import refuse_what_export_drops
from graphopt.capture.unsupported_modules import refuse_cumulative_averages
from graphopt.errors import CaptureError, GraphoptError, OutputError
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind, OutputKind

LossFunction = Callable[[Any, Any], torch.Tensor]
DEFAULT_LOSS = "loss"

_INPUT_KINDS = {
    ExportInput.PARAMETER: InputKind.PARAM,
    ExportInput.BUFFER: InputKind.BUFFER,
    ExportInput.USER_INPUT: InputKind.BATCH,
}
_OUTPUT_KINDS = {
    ExportOutput.USER_OUTPUT: OutputKind.USER,
    ExportOutput.BUFFER_MUTATION: OutputKind.BUFFER_UPDATE,
    ExportOutput.USER_INPUT_MUTATION: OutputKind.BATCH_UPDATE,
}


@dataclass(frozen=True)
class OutputRequest:
    """What a user asked for: output names (None: all), which is the loss, and whether there must be one."""

    outputs: tuple[str, ...] | None
    loss: str | LossFunction | None = None
    require_loss: bool = False

    @property
    def loss_name(self) -> str:
        """The name of the loss among the outputs."""
        return self.loss if isinstance(self.loss, str) else DEFAULT_LOSS


@dataclass(frozen=True)
class Captured:
    """A forward Program, the structure its user outputs are rebuilt into, and the loss among them (or None)."""

    program: Program
    structure: Container
    loss_name: str | None


def capture_program(model: torch.nn.Module, batch: BoundBatch, request: OutputRequest) -> Captured:
    """The model's forward for this batch's shapes as a functional ATen Program.

    Neither the model nor any random generator is changed. Raises CaptureError with the user's source line for what
    cannot be captured, OutputError for outputs that do not exist or a loss that is not a scalar.
    """
    refuse_module_hooks(model)
    refuse_cumulative_averages(model)
    wrapper = _SelectedOutputs(model, batch, request)
    exported = _export(wrapper, [_stand_in(tensor) for tensor in batch.tensors])
    selection = wrapper.recorder.selection
    assert selection is not None, "export never ran the model"
    program = forward_program(
        exported.graph_module,
        inputs=_exported_inputs(exported, model, batch.names),
        outputs=_exported_outputs(exported, selection.names, batch.names),
    )
    loss_name = request.loss_name if request.loss_name in selection.names else None
    return Captured(program, selection.structure, loss_name)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Memory never touched, laid out like ``tensor``: export keeps its example inputs alive in reference cycles."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class _Recorder:
    """Carries the selection out of the trace; export restores plain attributes of modules, so they cannot."""

    selection: OutputSelection | None = None


class _SelectedOutputs(torch.nn.Module):
    """The model with flat tensors in and the requested tensors out."""

    def __init__(self, model: torch.nn.Module, batch: BoundBatch, request: OutputRequest) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.batch = batch
        self.request = request
        self.recorder = _Recorder()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs, extra = self.batch.arguments(tensors)
        states = ModuleStates(self.model)
        try:
            result = self.model(*args, **kwargs)
            selection = self._select(result, args, kwargs, extra)
            returned = states.write_rebound_buffers(selection.tensors)
            states.refuse_changes()
        finally:
            states.restore()
        # The structure is all that is kept: tensors of a trace must not outlive it.
        self.recorder.selection = OutputSelection(selection.names, (), selection.structure)
        return returned

    def _select(self, result: Any, args: Any, kwargs: Any, extra: Any) -> OutputSelection:
        request = self.request
        name = request.loss_name
        wanted: Sequence[str] | None
        if callable(request.loss):
            wanted = None if request.outputs is None else [output for output in request.outputs if output != name]
            named = dict(zip(self._parameter_names(), args, strict=False))
            loss = request.loss(_readable(result), StepOutput({**named, **kwargs, **extra}))
            selection = with_loss(select_outputs(result, wanted), name, _checked_loss(loss, name))
            return selection
        if request.outputs is None or request.loss is None:
            wanted = request.outputs
        else:
            wanted = (*request.outputs, *(() if name in request.outputs else (name,)))
        selection = select_outputs(result, wanted)
        if name in selection.names:
            _checked_loss(selection.tensors[selection.names.index(name)], name)
        elif request.require_loss:
            raise OutputError(_no_loss(request, result))
        return selection

    def _parameter_names(self) -> list[str]:
        import inspect

        return list(inspect.signature(self.model.forward).parameters)


def _readable(result: Any) -> Any:
    return StepOutput(result) if type(result) is dict else result


def _checked_loss(loss: Any, name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise OutputError(f"the loss {name!r} must be a tensor with one element; it is a {type(loss).__name__}")
    if loss.numel() != 1:
        raise OutputError(f"the loss {name!r} must be a scalar; its shape is {list(loss.shape)}: take its mean or sum")
    if not loss.is_floating_point():
        raise OutputError(f"the loss {name!r} is not differentiable: its dtype is {loss.dtype}, not a float")
    return loss


def _no_loss(request: OutputRequest, result: Any) -> str:
    there = [name for name, value in named_leaves(result) if isinstance(value, torch.Tensor)]
    asked = "all outputs" if request.outputs is None else f"outputs={list(request.outputs)}"
    return (
        f"{asked} holds no loss called {request.loss_name!r}, but a step with an optimizer needs one; the model "
        f"returns {', '.join(there) or 'no tensors'}. Add the loss to outputs, or name it with loss='name', or give "
        "loss=function(outputs, batch)"
    )


def _export(wrapper: _SelectedOutputs, tensors: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    correct_fake_layouts()
    with torch.random.fork_rng(), warnings.catch_warnings(), quiet_export(), any_attribute_name():
        warnings.simplefilter("ignore")
        try:
            with refuse_what_export_drops():
                exported = torch.export.export(wrapper, tuple(tensors), strict=False)
            regions = inline_grad_mode_regions(exported.graph_module)
            refuse_lost_gradients(exported.graph_module.graph, regions, _gradient_sources(exported, wrapper))
            broadcast_copies(exported.graph_module)
            with operators_listed_once(), overrides_remembered():
                return exported.run_decompositions({})
        except GraphoptError:
            raise
        except Exception as error:
            raise CaptureError(capture_message(error)) from error


def _gradient_sources(exported: torch.export.ExportedProgram, wrapper: _SelectedOutputs) -> set[str]:
    """Names of the placeholders that take gradients: trained parameters, and batch tensors that ask for one."""
    signature = exported.graph_signature
    trained = {name for name, parameter in wrapper.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    names = {name for name, path in signature.inputs_to_parameters.items() if path in trained}
    asking = zip(signature.user_inputs, wrapper.batch.tensors, strict=False)
    return names | {str(name) for name, tensor in asking if tensor.requires_grad}


def _exported_inputs(
    exported: torch.export.ExportedProgram, model: torch.nn.Module, batch_names: Sequence[str]
) -> list[ExportedValue]:
    canonical = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    by_path = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    batch = iter(batch_names)
    values = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is ExportInput.CONSTANT_TENSOR:
            values.append(ExportedValue(None, str(spec.target), exported.constants[str(spec.target)]))
        elif spec.kind is ExportInput.USER_INPUT:
            values.append(ExportedValue(InputKind.BATCH, next(batch)))
        elif spec.kind in _INPUT_KINDS:
            path = str(spec.target).removeprefix("model.")
            values.append(ExportedValue(_INPUT_KINDS[spec.kind], canonical.get(id(by_path.get(path)), path)))
        else:
            raise CaptureError(f"the model holds {spec.target!r} of kind {spec.kind.name}, which a graph cannot hold")
    return values


def _exported_outputs(
    exported: torch.export.ExportedProgram, names: Sequence[str], batch_names: Sequence[str]
) -> list[tuple[OutputKind, str]]:
    user_inputs = dict(zip(exported.graph_signature.user_inputs, batch_names, strict=False))
    user = iter(names)
    outputs: list[tuple[OutputKind, str]] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in _OUTPUT_KINDS:
            raise CaptureError(
                f"forward() writes into {str(spec.target).removeprefix('model.')!r} ({spec.kind.name.lower()}); "
                "only buffers and batch tensors may be written: keep such a value in a buffer"
            )
        kind = _OUTPUT_KINDS[spec.kind]
        if kind is OutputKind.USER:
            outputs.append((kind, next(user)))
        elif kind is OutputKind.BATCH_UPDATE:
            outputs.append((kind, user_inputs[spec.target]))
        else:
            outputs.append((kind, str(spec.target).removeprefix("model.")))
    return outputs
