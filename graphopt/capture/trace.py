"""Tracing a Python function into a Program: the adapter to ``make_fx`` and functionalisation.

Private torch: ``torch.fx.experimental.proxy_tensor.make_fx`` and ``torch.fx.traceback`` (torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from graphopt.capture.fake_layouts import correct_fake_layouts
from graphopt.capture.origins import read_origins
from graphopt.capture.recurrent import use_lstm_operator
from graphopt.ir import ops
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, Signature, TensorSpec


def new_fake_mode() -> FakeTensorMode:
    """A fake tensor mode that lets real constants appear in traced code."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(mode: FakeTensorMode, spec: TensorSpec, *, requires_grad: bool = False) -> torch.Tensor:
    """A fake tensor of ``spec``."""
    with mode:
        fake = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return fake.requires_grad_(requires_grad)


def trace_functional(function: Callable[..., Sequence[Any]], fakes: Sequence[Any]) -> fx.GraphModule:
    """The functional ATen graph of ``function`` run on fake tensors; it returns one flat tuple.

    Gradients may be taken inside ``function``. In-place operators that backward formulas bring along are functionalised
    by a second trace.
    """
    correct_fake_layouts()
    with preserve_node_meta():
        module = make_fx(function, tracing_mode="real")(*fakes)
        if any(ops.is_mutating(node) for node in module.graph.nodes if node.op == "call_function"):
            detached = [fake.detach() if isinstance(fake, torch.Tensor) else fake for fake in fakes]
            replay = torch.func.functionalize(_interpret(module), remove="mutations")
            module = make_fx(replay, tracing_mode="real")(*detached)
    return module


def program_from_trace(
    module: fx.GraphModule, inputs: Sequence[Input], outputs: Sequence[Output], *, stage: Stage
) -> Program:
    """The Program of a traced module; origins are read from what the trace preserved, other metadata is dropped."""
    returned = module.graph.output_node().args[0]
    values = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    module.graph.output_node().args = (values,)
    _move_constants(module)
    use_lstm_operator(module.graph)
    origins = read_origins(module.graph)
    for node in module.graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    program = Program(module, Signature(tuple(inputs), tuple(outputs)), stage=stage, origins=origins)
    _fill_constant_values(program)
    program.refresh()
    program.finish()
    return program


def trace_function(function: Callable[..., Any], *inputs: torch.Tensor, stage: Stage = Stage.FORWARD) -> Program:
    """The Program of a plain tensor function: inputs are batch entries ``0``, ``1``, ...; so are the outputs."""
    mode = new_fake_mode()
    specs = [TensorSpec.of(tensor) for tensor in inputs]

    def flat(*arguments: Any) -> tuple[Any, ...]:
        result = function(*arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    module = trace_functional(flat, [fake_like(mode, spec) for spec in specs])
    values = module.graph.output_node().args[0]
    return program_from_trace(
        module,
        [Input(str(i), InputKind.BATCH, spec) for i, spec in enumerate(specs)],
        [
            Output(str(i), OutputKind.USER, TensorSpec.of(value.meta["val"]))  # type: ignore[union-attr]
            for i, value in enumerate(values)  # type: ignore[arg-type]
        ],
        stage=stage,
    )


def _interpret(module: fx.GraphModule) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return fx.Interpreter(module).run(*arguments)

    return run


def _move_constants(module: fx.GraphModule) -> None:
    """Let every constant be a buffer of a flat module, once, called ``constant_N``."""
    names: dict[int, str] = {}
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        tensor = _attribute(module, str(node.target))
        if id(tensor) not in names:
            names[id(tensor)] = f"constant_{len(names)}"
            module.register_buffer(names[id(tensor)], tensor.detach(), persistent=False)
        node.target = names[id(tensor)]


def _attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the traced constant {path} is a {type(value).__name__}, not a tensor")
    return value


def _fill_constant_values(program: Program) -> None:
    values: dict[str, Any] = {}
    for node in program.constants():
        name = str(node.target)
        if name not in values:
            values[name] = program.fake_mode.from_tensor(program.constant(node), static_shapes=True)
        node.meta["val"] = values[name]
