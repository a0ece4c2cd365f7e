"""A forward Program from an exported graph: named inputs, tied parameters merged, constants lifted in, no checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.capture.eager_operators import use_eager_operators
from graphopt.capture.origins import read_origins
from graphopt.capture.trace import fake_like, new_fake_mode
from graphopt.errors import CaptureError
from graphopt.ir import ops
from graphopt.ir.program import GraphHolder, Program, Stage
from graphopt.ir.spec import Input, InputKind, Output, OutputKind, Signature, TensorSpec

aten = torch.ops.aten


@dataclass(frozen=True)
class ExportedValue:
    """What a placeholder of the exported graph stands for; ``kind`` None means ``constant``."""

    kind: InputKind | None
    name: str
    constant: torch.Tensor | None = None


def forward_program(
    exported: fx.GraphModule, *, inputs: Sequence[ExportedValue], outputs: Sequence[tuple[OutputKind, str]]
) -> Program:
    """The forward Program of an exported functional graph; raises CaptureError for sizes that depend on values."""
    _refuse_symbolic(exported)
    origins = read_origins(exported.graph)
    graph, root = fx.Graph(), torch.nn.Module()
    mapping: dict[fx.Node, fx.Node] = {}
    kept = _copy_placeholders(exported, inputs, graph, root, mapping)
    for node in exported.graph.nodes:
        if node.op in ("placeholder", "output") or ops.is_call(node, aten._assert_tensor_metadata.default):
            continue
        if node.op == "get_attr":
            root.register_buffer(str(node.target), _constant(exported, str(node.target)), persistent=False)
        args, kwargs = fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
        twin = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        if node.name in origins:
            origins[twin.name] = origins[node.name]
        mapping[node] = twin
    returned: Any = fx.map_arg(exported.graph.output_node().args[0], mapping.__getitem__)
    values = tuple(returned)
    graph.output(values)
    _set_input_values(graph, kept)
    program = Program(GraphHolder(root, graph), Signature(tuple(kept), ()), stage=Stage.FORWARD, origins=origins)
    _set_constant_values(program)
    program.refresh()
    program.set_outputs(
        program.output_values(), [_output(program, value, *named) for value, named in zip(values, outputs, strict=True)]
    )
    use_eager_operators(program)
    _check_updates(program)
    program.finish()
    return program


def _copy_placeholders(
    exported: fx.GraphModule,
    inputs: Sequence[ExportedValue],
    graph: fx.Graph,
    root: torch.nn.Module,
    mapping: dict[fx.Node, fx.Node],
) -> list[Input]:
    kept: list[Input] = []
    by_key: dict[tuple[InputKind, str], fx.Node] = {}
    constants: list[tuple[fx.Node, ExportedValue]] = []
    for node, value in zip(exported.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if value.kind is None:
            constants.append((node, value))
            continue
        key = (value.kind, value.name)
        if key not in by_key:
            by_key[key] = graph.placeholder(_identifier(value.kind, value.name))
            kept.append(Input(value.name, value.kind, TensorSpec.of(node.meta["val"])))
        mapping[node] = by_key[key]
    for node, value in constants:
        assert value.constant is not None
        name = _identifier(None, value.name)
        root.register_buffer(name, value.constant.detach(), persistent=False)
        mapping[node] = graph.get_attr(name)
    return kept


def _identifier(kind: InputKind | None, name: str) -> str:
    prefix = {InputKind.PARAM: "p_", InputKind.BUFFER: "b_", None: "c_"}.get(kind, "")
    word = prefix + re.sub(r"\W", "_", name)
    return word if word[:1].isalpha() or word[:1] == "_" else f"input_{word}"


def _set_input_values(graph: fx.Graph, inputs: Sequence[Input]) -> None:
    mode = new_fake_mode()
    for node, entry in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        assert isinstance(entry.spec, TensorSpec)
        node.meta = {"val": fake_like(mode, entry.spec)}


def _set_constant_values(program: Program) -> None:
    mode = program.fake_mode
    for node in program.constants():
        node.meta = {"val": mode.from_tensor(program.constant(node), static_shapes=True)}
    for node in program.ops():
        node.meta = {}


def _output(program: Program, value: Any, kind: OutputKind, name: str) -> Output:
    if not isinstance(value, fx.Node):
        raise CaptureError(f"output {name!r} is the fixed value {value!r}, not a tensor computed by the model")
    return Output(name, kind, program.spec(value))


def _check_updates(program: Program) -> None:
    """Every buffer and batch tensor written must keep its shape and dtype."""
    specs = {entry.name: entry.spec for entry in program.signature.inputs}
    for output, value in zip(program.signature.outputs, program.output_values(), strict=True):
        if output.kind not in (OutputKind.BUFFER_UPDATE, OutputKind.BATCH_UPDATE) or output.name not in specs:
            continue
        old, new = specs[output.name], program.spec(value)
        if isinstance(old, TensorSpec) and (old.shape, old.dtype) != (new.shape, new.dtype):
            raise CaptureError(
                f"forward() writes {new} into {output.name!r}, which is {old}; what to do: write a value of the same "
                "shape and dtype"
            )


def _constant(exported: fx.GraphModule, target: str) -> torch.Tensor:
    value = getattr(exported, target)
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"the model contains a control-flow region ({target}); only straight-line code is captured")
    return value.detach()


def _refuse_symbolic(exported: fx.GraphModule) -> None:
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            symbolic = isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
                isinstance(leaf, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape)
            )
            if symbolic:
                origin = read_origins(exported.graph).get(node.name)
                raise CaptureError(
                    f"the size or value computed at\n  {origin}\ndepends on the content of a tensor ({node.target}); "
                    "what to do: use a fixed size (torch.where, masking, topk) or pass the number in the batch"
                )
