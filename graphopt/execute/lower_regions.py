"""The step Program with its regions compiled: the same order, in which one call does what many did.

Before: ``mul = aten.mul.Tensor(a, b)``, ``add = aten.add.Tensor(mul, c)``, ... (a layer's worth).
After: ``(x, y,) = region_3(a, b, c)``. Parameters and state whose update is computed and may be written inside a region
are written by it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.execute.region import Region
from graphopt.execute.region_compile import compiled_region
from graphopt.execute.region_cuts import Owners, Span, cut_spans, takes_shape_alone
from graphopt.execute.region_graph import NUMBER_SPEC, RegionGraph, region_graph
from graphopt.execute.region_reads import span_readers, writes_inside
from graphopt.execute.region_recompute import recompute_in_readers
from graphopt.execute.region_scalars import is_number
from graphopt.ir import ops
from graphopt.ir.program import GraphHolder, Program, nodes_in
from graphopt.ir.spec import UPDATE_KINDS

aten = torch.ops.aten

Compiler = Callable[[RegionGraph, int], Region]
"""Makes the region with a number; asked once for each distinct graph of a program."""


@dataclass(frozen=True)
class Lowering:
    """``program``: the lowered one; ``spans``: how its order was cut; ``span_of``: the span of each region's call."""

    program: Program
    spans: tuple[Span, ...]
    span_of: dict[str, Span]


def lower_regions(
    program: Program, spans: Sequence[Span] | None = None, *, compile_region: Compiler = compiled_region
) -> Lowering:
    """``program`` (functional) with its regions compiled, cut as ``spans`` say (default: at the layers)."""
    owners = Owners(program)
    chosen = tuple(spans) if spans is not None else cut_spans(program, owners)
    return _Lowerer(program, owners, chosen, compile_region).lower()


class _Lowerer:
    def __init__(self, program: Program, owners: Owners, spans: tuple[Span, ...], compile_region: Compiler) -> None:
        self.source = program
        self.owners = owners
        self.spans = spans
        self.compile_region = compile_region
        self.new = _with_inputs_of(program)
        self.values: dict[fx.Node, fx.Node] = dict(zip(program.placeholders(), self.new.placeholders(), strict=True))
        self.regions: dict[str, Region] = {}
        self.numbers: dict[fx.Node, fx.Node] = {}
        self.written = writes_inside(program, spans)
        written = {value for updates in self.written.values() for value in updates}
        readers = span_readers(program, owners, spans, written=written)
        self.recomputed = recompute_in_readers(program, owners, spans, readers)
        self.span_of: dict[str, Span] = {}

    def lower(self) -> Lowering:
        """Emit every span; return what the program returned."""
        for node in self.source.constants():
            self.values[node] = self._constant(node)
        for number, span in enumerate(self.spans):
            if span.is_region:
                self._region(number, span)
            else:
                for node in span.nodes:
                    self._plain(node)
            self._returned_views(span)
        inside = {value: target for updates in self.written.values() for value, target in updates.items()}
        values = [
            self.values[inside[value]] if value in inside and output.kind in UPDATE_KINDS else self._value(value)
            for value, output in zip(self.source.output_values(), self.source.signature.outputs, strict=True)
        ]
        self.new.set_outputs(values, self.source.signature.outputs)
        self.new.finish()
        return Lowering(self.new, self.spans, self.span_of)

    def _returned_views(self, span: Span) -> None:
        """Make the views of what ``span`` made that the program returns: at its end would be in another segment."""
        made = set(span.nodes)
        for value in nodes_in(self.source.output_values()):
            if self.owners.is_alias(value) and self.owners.maker(value) in made:
                self._value(value)

    def _constant(self, node: fx.Node) -> fx.Node:
        with self.new.graph.inserting_before(self.new.output_node()):
            twin = self.new.graph.create_node("get_attr", node.target, (), {}, name=node.name)
        twin.meta["val"] = node.meta["val"]
        self.new.origins[twin.name] = self.source.origin(node)
        return twin

    def _emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        node = self.new.insert_before(self.new.output_node(), target, *args, **kwargs)
        self.new.origins[node.name] = self.source.origin(like)
        return node

    def _value(self, node: Any) -> Any:
        """The new node for ``node``; a view is made when it is first asked for."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.values and ops.is_getitem(node):
            self._value(node.args[0])  # which brings all its elements
        if node not in self.values:
            self._plain(node)
        return self.values[node]

    def _plain(self, node: fx.Node) -> None:
        """Call ``node`` as it is."""
        if takes_shape_alone(node) and node.all_input_nodes:
            self._shaped(node)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        twin = self._emit(node.target, *args, like=node, **kwargs)
        self.values[node] = twin
        if isinstance(node.meta["val"], (tuple, list)):
            for user in node.users:
                if ops.is_getitem(user):
                    self.values[user] = self._emit(operator.getitem, twin, user.args[1], like=user)

    def _shaped(self, node: fx.Node) -> None:
        """The same memory, and the same random bits in it, without the argument whose shape and layout they have."""
        if ops.is_uninitialised(node) and all(ops.draws_by_shape(user) for user in node.users):
            return
        value = node.meta["val"]
        shape, stride = list(value.shape), list(value.stride())
        empty = self._emit(aten.empty_strided.default, shape, stride, dtype=value.dtype, device=value.device, like=node)
        draws = ops.draws_by_shape(node)
        self.values[node] = self._emit(aten.bernoulli_.float, empty, node.args[1], like=node) if draws else empty

    def _region(self, number: int, span: Span) -> None:
        updates = self.written.get(number, {})
        graph = region_graph(
            span,
            self.owners,
            needed=lambda value: bool(self.recomputed.readers.get(value, set()) - {number}),
            updates=updates,
            recomputed=self.recomputed.by_span.get(number, frozenset()),
        )
        if not graph.outputs and not graph.writes:
            return
        if graph.text not in self.regions:
            self.regions[graph.text] = self.compile_region(graph, len(self.regions))
        region = self.regions[graph.text]
        arguments = [self._number(node) if is_number(node) else self._value(node) for node in graph.inputs]
        call = self._emit(region, *arguments, like=span.nodes[-1])
        self.span_of[call.name] = span
        for position, value in enumerate(graph.outputs):
            element = self._emit(operator.getitem, call, position, like=value)
            self.values[value] = element

    def _number(self, node: fx.Node) -> fx.Node:
        """A Python number as the 0-dim tensor in which a region takes it."""
        if node not in self.numbers:
            self.numbers[node] = self._emit(
                aten.scalar_tensor.default, self._value(node), dtype=NUMBER_SPEC.dtype, like=node
            )
        return self.numbers[node]


def _with_inputs_of(program: Program) -> Program:
    """A Program with the inputs, constants and history of ``program`` and no calls yet."""
    graph = fx.Graph()
    for node in program.placeholders():
        twin = graph.placeholder(node.name)
        assert twin.name == node.name, f"the copy of {node.name} is called {twin.name}"
        twin.meta["val"] = node.meta["val"]
    graph.output(())
    new = Program(
        GraphHolder(torch.nn.Module(), graph),
        program.signature,
        stage=program.stage,
        origins={node.name: program.origin(node) for node in program.placeholders()},
        history=program.history,
    )
    for name, tensor in program.module._buffers.items():
        new.module.register_buffer(name, tensor, persistent=False)
    new.decisions = program.decisions
    new.precision = program.precision
    new.fp8 = program.fp8
    new.default_fake_mode = program.fake_mode
    return new
