"""CompiledModule: a model whose forward and backward run as compiled graphs, for any trainer and any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from graphopt.capture.batch import BatchBinder, BoundBatch
from graphopt.capture.export import Captured
from graphopt.capture.hooks import refuse_module_hooks
from graphopt.capture.outputs import rebuild
from graphopt.errors import StateError, UnsupportedError
from graphopt.execute.cache import SignatureCache, ambient_key, batch_key, describe_batch
from graphopt.execute.executable import Executable, run_segment
from graphopt.execute.inputs import asked_outputs, collect_inputs, refuse_aliased, user_outputs, write_back
from graphopt.execute.model_view import ModelView, view_model
from graphopt.execute.module_scales import ModuleScales
from graphopt.fp8 import Delayed
from graphopt.ir.ambient import plain_execution
from graphopt.ir.liveness import forward_end
from graphopt.ir.program import Program
from graphopt.ir.spec import Input, InputKind, OutputKind, TensorSpec
from graphopt.ir.storage import storage_map


class ModuleBuilder(Protocol):
    """What a CompiledModule needs from the compiler."""

    model: torch.nn.Module
    binder: BatchBinder
    options: Any
    dump_folders: list[Path]

    def is_current(self, evaluation: Program) -> bool: ...
    def gradient(self, batch: BoundBatch, *, wrt: Sequence[str], title: str) -> Any: ...
    def module_step(self, built: Any) -> Executable: ...
    def inference(self, batch: BoundBatch) -> tuple[Captured, Executable]: ...


@dataclass(frozen=True)
class _Compiled:
    """``saved``: positions of the inputs that the backward reads; ``undifferentiated``: positions (among user outputs)
    of those that have a gradient in eager but none here."""

    captured: Captured
    executable: Executable
    wrt: tuple[str, ...]
    modules: tuple[torch.nn.Module, ...]
    saved: tuple[int, ...] = ()
    undifferentiated: tuple[int, ...] = ()


class CompiledModule(torch.nn.Module):
    """The model, compiled: same parameters, same state-dict keys, same attributes; ``backward()`` fills ``.grad``."""

    def __init__(self, builder: ModuleBuilder) -> None:
        super().__init__()
        model = builder.model
        # The same dicts, not copies: keys, modes, moves and replacements are the model's own.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_model"] = model
        self.__dict__["_builder"] = builder
        self.__dict__["_cache"] = SignatureCache(builder.options.max_signatures)
        self.__dict__["_last"] = None
        recipe = builder.options.precision.fp8
        self.__dict__["_fp8"] = ModuleScales(recipe) if isinstance(recipe, Delayed) else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_model")
        if model is None:
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    @property
    def training(self) -> bool:
        """The model's own mode."""
        model = self.__dict__.get("_model")
        return True if model is None else bool(model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self.__dict__["_model"].training = mode

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the mode of the model and everything below."""
        self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state dict, with its keys and hooks."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model itself."""
        return self._model.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The requested outputs by name, as attribute and key; the loss (without one, every output) has a gradient."""
        bound = self._builder.binder.bind(args, kwargs)
        view = view_model(self._model, self._builder.options.loss)
        if view.has_hooks:
            refuse_module_hooks(self._model)
        wrt = self._differentiated(bound, view)
        key = (batch_key(bound), view.key, ambient_key(), wrt)
        compiled = self._cache.get(
            key,
            lambda: self._compile(bound, view, wrt),
            describe=describe_batch(bound),
            is_current=lambda built: bool(wrt) or self._builder.is_current(built.executable.program),
        )
        self.__dict__["_last"] = compiled.executable
        refuse_aliased(compiled.executable.program, bound)
        inputs = collect_inputs(compiled.executable.program, view, bound, self._state(compiled.executable.program))
        if not wrt:
            with plain_execution():
                outputs = compiled.executable.run(inputs)
                write_back(compiled.executable, inputs, outputs)
            return rebuild(compiled.captured.structure, user_outputs(compiled.executable.program, outputs))
        sources = [_by_name(name, view, bound) for name in compiled.wrt]
        values = list(_CompiledFunction.apply(compiled, inputs, self._fp8, *sources))
        for position in compiled.undifferentiated:
            anchor = values[min(_root_positions(compiled.executable.program))]
            values[position] = _NoGradient.apply(values[position], anchor)
        return rebuild(compiled.captured.structure, values)

    def _state(self, program: Program) -> Callable[[Input], Any]:
        """What gives the value of a STATE input: scales of delayed scaling, and nothing else."""
        if self._fp8 is None:
            return _no_state
        return lambda entry: self._fp8.scales(program, entry)

    def fp8_state_dict(self) -> dict[str, Any]:
        """What delayed scaling has seen, which the model's own ``state_dict`` does not hold; empty for other recipes.

        A training that goes on with the same bits saves it, and gives it to ``load_fp8_state_dict``.
        """
        return {} if self._fp8 is None else self._fp8.state_dict()

    def load_fp8_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``fp8_state_dict`` gave; StateError if it is damaged."""
        if self._fp8 is not None:
            self._fp8.load_state_dict(saved)

    def _differentiated(self, bound: BoundBatch, view: ModelView) -> tuple[str, ...]:
        if not torch.is_grad_enabled():
            return ()
        parameters = [name for name, parameter in view.parameters.items() if parameter.requires_grad]
        batch = [name for name, tensor in zip(bound.names, bound.tensors, strict=True) if tensor.requires_grad]
        return (*parameters, *batch)

    def _compile(self, bound: BoundBatch, view: ModelView, wrt: tuple[str, ...]) -> _Compiled:
        if not wrt:
            captured, executable = self._builder.inference(bound)
            return _Compiled(captured, executable, (), view.modules)
        part = self._builder.gradient(bound, wrt=wrt, title="forward-backward")
        executable = self._builder.module_step(part)
        return _Compiled(
            part.captured,
            executable,
            part.reached,
            view.modules,
            saved=_read_in_backward(executable),
            undifferentiated=_undifferentiated(executable.program, part.differentiable),
        )

    def report(self, *, measure: bool = False) -> Any:
        """The report of what ran last; see ``TrainStep.report``."""
        from graphopt.report.step_report import step_report

        return step_report(self._ran(), self._builder.options, measure=measure)

    def explain(self, name: str) -> str:
        """What became of a module, parameter or value; see ``TrainStep.explain``."""
        from graphopt.report.explain import explain

        return explain(self._ran(), name)

    @property
    def dumps(self) -> tuple[Path, ...]:
        """The folders that ``dump=`` filled, one a compiled graph, in order."""
        return tuple(self._builder.dump_folders)

    @property
    def source(self) -> str:
        """The Python that runs, as text."""
        return self._ran().source

    @property
    def program(self) -> Program:
        """The Program that ran last."""
        return self._ran().program

    def _ran(self) -> Executable:
        if self._last is None:
            raise StateError("nothing has been compiled yet: call the module once; the first batch is the example")
        return self._last  # type: ignore[no-any-return]


class _CompiledFunction(torch.autograd.Function):
    """Forward segment in forward, the rest in backward."""

    @staticmethod
    def forward(
        ctx: Any, compiled: _Compiled, inputs: list[Any], fp8: ModuleScales | None, *sources: torch.Tensor
    ) -> tuple[Any, ...]:
        executable = compiled.executable
        outputs: list[Any] = [None] * len(executable.program.signature.outputs)
        with plain_execution():
            carried = run_segment(executable.segments[0], inputs, [], outputs)
            write_back(executable, inputs, outputs)
            if fp8 is not None:
                fp8.saw_forward(executable.program, outputs)
        ctx.fp8 = fp8
        values = user_outputs(executable.program, outputs)
        _remember(ctx, compiled, inputs, carried, values)
        roots = _root_positions(executable.program)
        ctx.mark_non_differentiable(*(value for i, value in enumerate(values) if i not in roots))
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        compiled: _Compiled = ctx.compiled
        program = compiled.executable.program
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True (a gradient of the gradient) is not supported by a compiled module"
            )
        inputs, carried = _recall(ctx)
        _fill_tangents(program, inputs, tangents)
        outputs: list[Any] = [None] * len(program.signature.outputs)
        with plain_execution():
            for segment in compiled.executable.segments[1:]:
                carried = run_segment(segment, inputs, carried, outputs)
            if ctx.fp8 is not None:
                ctx.fp8.saw_backward(program, outputs)
        gradients = {output.name: outputs[i] for i, output in program.signature.outputs_of(OutputKind.GRAD)}
        return (None, None, None, *(gradients[name] for name in compiled.wrt))


def _remember(ctx: Any, compiled: _Compiled, inputs: list[Any], carried: list[Any], values: list[Any]) -> None:
    """Keep what backward needs. Inputs and outputs go through autograd (version checks, no cycles), the rest in a list
    that backward empties as it goes."""
    returned = {id(value): i for i, value in enumerate(values)}
    ctx.compiled = compiled
    ctx.tensor_inputs = compiled.saved
    ctx.num_inputs = len(inputs)
    ctx.returned = [(i, returned[id(value)]) for i, value in enumerate(carried) if id(value) in returned]
    ctx.carried = [None if id(value) in returned else value for value in carried]
    ctx.save_for_backward(*(inputs[i] for i in ctx.tensor_inputs), *(values[i] for _, i in ctx.returned))


def _recall(ctx: Any) -> tuple[list[Any], list[Any]]:
    saved = ctx.saved_tensors
    inputs: list[Any] = [None] * ctx.num_inputs
    for i, tensor in zip(ctx.tensor_inputs, saved, strict=False):
        inputs[i] = tensor
    # Backward writes into values that die in it; a second backward (retain_graph) needs them whole.
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
    carried = (
        [value.clone() if isinstance(value, torch.Tensor) else value for value in ctx.carried]
        if keeps_graph
        else ctx.carried
    )
    for (i, _), tensor in zip(ctx.returned, saved[len(ctx.tensor_inputs) :], strict=True):
        carried[i] = tensor
    if not keeps_graph:
        ctx.carried = []
    return inputs, carried


class _NoGradient(torch.autograd.Function):
    """An output beside the loss: whoever sends a gradient into it is told that it would be lost."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        raise UnsupportedError(
            "only the loss of this compiled module has a gradient, but backward() came through another output as well. "
            "Compute the whole loss inside with loss=function(outputs, batch), leave the loss out of outputs=[...] so "
            "that every output has a gradient, or detach() the output"
        )


def _undifferentiated(program: Program, differentiable: Sequence[str]) -> tuple[int, ...]:
    roots = _root_positions(program)
    users = [output.name for _, output in asked_outputs(program)]
    return tuple(i for i, name in enumerate(users) if name in differentiable and i not in roots)


def _read_in_backward(executable: Executable) -> tuple[int, ...]:
    """Positions of the tensor inputs that the segments behind the forward read, themselves or through a view."""
    program = executable.program
    held = storage_map(program).held
    late = executable.plan.order[forward_end(program) :]
    read = {number for node in late for argument in node.all_input_nodes for number in held[argument]}
    return tuple(
        i
        for i, (node, entry) in enumerate(zip(program.placeholders(), program.signature.inputs, strict=True))
        if not read.isdisjoint(held[node]) and entry.kind is not InputKind.TANGENT
    )


def _fill_tangents(program: Program, inputs: list[Any], tangents: Sequence[torch.Tensor | None]) -> None:
    users = [output for _, output in asked_outputs(program)]
    given = {output.name: tangent for output, tangent in zip(users, tangents, strict=True)}
    for i, entry in program.signature.inputs_of(InputKind.TANGENT):
        tangent = given[entry.name.removeprefix("tangent.")]
        if tangent is None:
            assert isinstance(entry.spec, TensorSpec)
            tangent = torch.zeros(entry.spec.shape, dtype=entry.spec.dtype, device=entry.spec.device)
        inputs[i] = tangent.contiguous()


def _root_positions(program: Program) -> set[int]:
    """Which user outputs have a tangent, counted among user outputs (for membership tests)."""
    roots = {entry.name.removeprefix("tangent.") for _, entry in program.signature.inputs_of(InputKind.TANGENT)}
    users = [output.name for _, output in asked_outputs(program)]
    return {i for i, name in enumerate(users) if name in roots}


def _by_name(name: str, view: ModelView, bound: BoundBatch) -> torch.Tensor:
    if name in view.parameters:
        return view.parameters[name]
    return bound.tensors[bound.names.index(name)]


def _no_state(entry: Input) -> Any:
    raise AssertionError(f"a module without an optimizer reads no {entry.kind} {entry.name}")
