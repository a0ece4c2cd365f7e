"""One region as a graph of its own: what it reads, what it computes, what it returns and what it writes.

Two regions with the same ``key`` are the same code: equal calls, shapes, strides, dtypes and options in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.execute.region_cuts import Owners, Span
from graphopt.execute.region_scalars import call_with_tensors, is_number
from graphopt.ir import ops
from graphopt.ir.spec import TensorSpec
from graphopt.ir.text import target_text

aten = torch.ops.aten

NUMBER_SPEC = TensorSpec((), torch.float64, (), torch.device("cpu"))
"""How a Python number enters a region."""


@dataclass(frozen=True)
class RegionGraph:
    """Nodes are those of the program that the region is cut from.

    ``body``: its calls in order, with the views and elements that they read. ``inputs``: values from outside;
    ``outputs``: values that others read; ``writes``: values with the positions of the inputs they are written into.
    """

    inputs: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    writes: tuple[tuple[fx.Node, int], ...]
    text: str

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the inputs; a number comes as a 0-dim tensor."""
        return tuple(_input_spec(node) for node in self.inputs)

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the outputs."""
        return tuple(TensorSpec.of(node.meta["val"]) for node in self.outputs)

    def run(self, *arguments: Any) -> tuple[Any, ...]:
        """The outputs for ``arguments``; then the writes are made."""
        values: dict[fx.Node, Any] = dict(zip(self.inputs, arguments, strict=True))
        for node in self.body:
            args: Any
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            result = args[0][args[1]] if ops.is_getitem(node) else call_with_tensors(node, args, kwargs)
            values[node] = _as_planned(result, node.meta["val"])
        results = tuple(values[node] for node in self.outputs)
        for value, position in self.writes:
            aten.copy_.default(arguments[position], values[value])
        return results


def region_graph(
    span: Span,
    owners: Owners,
    *,
    needed: Callable[[fx.Node], bool],
    updates: Mapping[fx.Node, fx.Node],
    recomputed: AbstractSet[fx.Node] = frozenset(),
) -> RegionGraph:
    """The graph of ``span``. ``needed``: whether a value is read outside of it; ``updates``: values to the inputs that
    they are written into by the region itself; ``recomputed``: calls of other spans that it makes again."""
    builder = _Builder(owners, recomputed)
    for node in span.nodes:
        builder.add(node)
    made = [item for node in span.nodes for item in _values_made(node)]
    for value in made:
        if value in updates or needed(value):
            builder.read(value)
    targets = {value: updates[value] for value in made if value in updates}
    for target in targets.values():
        builder.read(target)
    inputs = tuple(builder.inputs)
    writes = tuple((value, inputs.index(target)) for value, target in targets.items())
    outputs = tuple(value for value in made if needed(value))
    return RegionGraph(
        inputs, tuple(builder.body), outputs, writes, _text(inputs, tuple(builder.body), outputs, writes)
    )


def _as_planned(result: Any, planned: Any) -> Any:
    """``result`` with the dtype and the strides of ``planned``: decompositions choose these in their own way, but what
    reads the value was captured for the operators'. Inductor sees a copy, which it fuses away unless the value leaves
    the region.
    """
    if not isinstance(result, torch.Tensor):
        return result
    if result.dtype != planned.dtype:
        result = aten._to_copy.default(result, dtype=planned.dtype)
    if result.stride() == planned.stride() or not result.numel():
        return result
    order = sorted(range(planned.dim()), key=lambda dim: (-planned.stride(dim), planned.shape[dim] == 1))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    dense = aten.clone.default(aten.permute.default(result, order), memory_format=torch.contiguous_format)
    restored = aten.permute.default(dense, inverse)
    return restored if restored.stride() == planned.stride() else result


def _values_made(node: fx.Node) -> list[fx.Node]:
    """The values that a call makes: itself, or the elements that are taken from its tuple."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return [node]
    return sorted(node.users, key=lambda user: int(user.args[1]))  # type: ignore[arg-type]


class _Builder:
    """Collects a region's calls, and before each the views and elements that it reads."""

    def __init__(self, owners: Owners, recomputed: AbstractSet[fx.Node]) -> None:
        self.owners = owners
        self.recomputed = recomputed
        self.body: dict[fx.Node, None] = {}
        self.inputs: dict[fx.Node, None] = {}

    def add(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            self.read(argument)
        self.body[node] = None

    def read(self, node: fx.Node) -> None:
        if node in self.body or node in self.inputs:
            return
        is_element = ops.is_getitem(node) and node.args[0] in self.body
        if is_element or self.owners.is_alias(node) or node in self.recomputed:
            self.add(node)
        else:
            self.inputs[node] = None


def _input_spec(node: fx.Node) -> TensorSpec:
    return NUMBER_SPEC if is_number(node) else TensorSpec.of(node.meta["val"])


def _text(
    inputs: Sequence[fx.Node],
    body: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    writes: Sequence[tuple[fx.Node, int]],
) -> str:
    """The region with every name replaced by a number: its key, and what dumps show."""
    names = {node: f"in{i}" for i, node in enumerate(inputs)} | {node: f"v{i}" for i, node in enumerate(body)}
    lines = [f"{names[node]}: {_spec_text(node)}" for node in inputs]
    for node in body:
        arguments = [_argument(item, names) for item in node.args]
        arguments += [f"{name}={_argument(item, names)}" for name, item in node.kwargs.items()]
        lines.append(f"{names[node]}: {_spec_text(node)} = {target_text(node.target)}({', '.join(arguments)})")  # type: ignore[arg-type]
    lines += [f"in{position}.copy_({names[value]})" for value, position in writes]
    lines.append(f"return ({', '.join(names[node] for node in outputs)})")
    return "\n".join(lines) + "\n"


def _spec_text(node: fx.Node) -> str:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        spec = TensorSpec.of(value)
        return f"{spec} strides{list(spec.stride)} offset {value.storage_offset()} {spec.device}"
    return f"tuple of {len(value)}" if isinstance(value, (tuple, list)) else "number"


def _argument(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    return f"{type(value).__name__} {value}"
