"""Program: a functional ATen graph with a signature. The only mutable type of the IR."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphopt.errors import ProgramError
from graphopt.ir.ambient import plain_execution
from graphopt.ir.decisions import DecisionTable
from graphopt.ir.fake import FakeTensor, FakeTensorMode
from graphopt.ir.fp8_table import Fp8Table
from graphopt.ir.inference import Inference
from graphopt.ir.origin import NO_ORIGIN, Origin
from graphopt.ir.precision_table import PrecisionTable
from graphopt.ir.spec import Input, Output, ScalarSpec, Signature, TensorSpec

if TYPE_CHECKING:
    from graphopt.pipeline.pass_base import PassRecord


class Stage(StrEnum):
    """How far a Program has come; a pass names the stage it runs at (ANY: every stage)."""

    FORWARD = "forward"
    JOINT = "joint"
    STEP = "step"
    ANY = "any"


class GraphHolder(fx.GraphModule):
    """A graph with its constants, whose Python code is never generated: programs are interpreted or emitted."""

    def recompile(self) -> Any:
        """Nothing: generating code for every intermediate program took a sixth of the compile time."""
        return None


class Program:
    """A functional ATen graph with a signature.

    ``module`` is an ``fx.GraphModule`` whose placeholders are ``signature.inputs`` in order, and whose output is one
    flat tuple, ``signature.outputs`` in order. Constants are tensors of the module, read by ``get_attr`` nodes.
    Of ``node.meta`` only ``val`` (the fake value) is a contract; ``origins`` holds where nodes came from, ``decisions``
    what becomes of values between forward and backward, ``precision`` what each operator of the forward part runs in,
    ``fp8`` which matrix products run in FP8.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        signature: Signature,
        *,
        stage: Stage,
        origins: Mapping[str, Origin] | None = None,
        history: tuple[PassRecord, ...] = (),
    ) -> None:
        self.module = module
        self.signature = signature
        self.stage = stage
        self.origins: dict[str, Origin] = dict(origins or {})
        self.history = history
        self.default_fake_mode: FakeTensorMode | None = None
        self.decisions = DecisionTable()
        self.precision = PrecisionTable()
        self.fp8 = Fp8Table()
        self._inferences: dict[fx.Node, Inference] = {}

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """The underlying FX graph."""
        return self.module.graph

    def placeholders(self) -> tuple[fx.Node, ...]:
        """Placeholder nodes, in the order of ``signature.inputs``."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    def ops(self) -> tuple[fx.Node, ...]:
        """A snapshot of all calls, in execution order (constants and placeholders left out)."""
        return tuple(node for node in self.graph.nodes if node.op == "call_function")

    def constants(self) -> tuple[fx.Node, ...]:
        """A snapshot of all nodes that read a constant tensor."""
        return tuple(node for node in self.graph.nodes if node.op == "get_attr")

    def output_node(self) -> fx.Node:
        """The node that returns the outputs."""
        return self.graph.output_node()

    def output_values(self) -> tuple[Any, ...]:
        """The returned nodes (or None, or numbers), in the order of ``signature.outputs``."""
        return tuple(self.output_node().args[0])  # type: ignore[arg-type]

    def input_named(self, name: str) -> fx.Node:
        """The placeholder of the input called ``name``; ProgramError when there is none."""
        for node, entry in zip(self.placeholders(), self.signature.inputs, strict=True):
            if entry.name == name:
                return node
        raise ProgramError(f"no input {name!r}; inputs are {[entry.name for entry in self.signature.inputs]}")

    def output_named(self, name: str) -> Any:
        """The node returned as the output called ``name``; ProgramError when there is none."""
        for value, entry in zip(self.output_values(), self.signature.outputs, strict=True):
            if entry.name == name:
                return value
        raise ProgramError(f"no output {name!r}; outputs are {[entry.name for entry in self.signature.outputs]}")

    def value(self, node: fx.Node) -> Any:
        """The fake value of ``node``: a FakeTensor, a tuple of them, or a number."""
        return node.meta["val"]

    def spec(self, node: fx.Node) -> TensorSpec:
        """The spec of a node that holds one tensor; ProgramError otherwise."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise ProgramError(f"{node.name} holds {type(value).__name__}, not one tensor")
        return TensorSpec.of(value)

    def constant(self, node: fx.Node) -> torch.Tensor:
        """The tensor that a ``get_attr`` node reads."""
        tensor = getattr(self.module, str(node.target))
        assert isinstance(tensor, torch.Tensor), f"{node.target} is not a tensor"
        return tensor

    def origin(self, node: fx.Node) -> Origin:
        """Where ``node`` came from."""
        return self.origins.get(node.name, NO_ORIGIN)

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The fake tensor mode that all values of this Program belong to."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            for leaf in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(leaf, FakeTensor):
                    return leaf.fake_mode
        return self.default_fake_mode or FakeTensorMode(allow_non_fake_inputs=True)

    # ---- changing ------------------------------------------------------------------------------------------------

    def insert_before(
        self, anchor: fx.Node, target: Callable[..., Any], *args: Any, origin_of: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """A new call of ``target`` placed before ``anchor``; its value is inferred by running it on fake values.

        The new node inherits the origin of ``origin_of`` (default: ``anchor``).
        """
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.infer(node)
        self.origins[node.name] = self.origin(origin_of or anchor)
        return node

    def insert_constant(self, anchor: fx.Node, tensor: torch.Tensor, *, name: str = "constant") -> fx.Node:
        """A node before ``anchor`` that reads ``tensor``, stored in the module."""
        attribute = next(f"{name}_{i}" for i in range(10**9) if not hasattr(self.module, f"{name}_{i}"))
        self.module.register_buffer(attribute, tensor, persistent=False)
        with self.graph.inserting_before(anchor):
            node = self.graph.get_attr(attribute)
        node.meta["val"] = self.fake_mode.from_tensor(tensor, static_shapes=True)
        self.origins[node.name] = self.origin(anchor)
        return node

    def replace(self, node: fx.Node, replacement: fx.Node) -> None:
        """Let every user of ``node``, the outputs included, use ``replacement``; erase ``node`` if nothing uses it."""
        node.replace_all_uses_with(replacement)
        self.erase_if_unused(node)

    def take_over(self, node: fx.Node, replacement: fx.Node) -> None:
        """As ``replace``, and ``replacement`` takes the name of ``node``, so that texts before and after stay alike."""
        name = node.name
        node.replace_all_uses_with(replacement)
        self.graph.erase_node(node)
        self.origins[name] = self.origins.pop(replacement.name, NO_ORIGIN)
        replacement.name = name
        self.graph._graph_namespace._rename_object(replacement, name)

    def erase_if_unused(self, node: fx.Node) -> None:
        """Erase ``node`` unless something uses it."""
        if node.users:
            return
        self.origins.pop(node.name, None)
        self.graph.erase_node(node)

    def set_outputs(self, values: Sequence[Any], outputs: Sequence[Output]) -> None:
        """Return ``values`` instead, described by ``outputs``."""
        self.output_node().args = (tuple(values),)
        self.signature = Signature(self.signature.inputs, tuple(outputs))

    def add_input(self, entry: Input, value: Any, *, name: str) -> fx.Node:
        """A new last input; ``value`` is its fake value (a float for a scalar)."""
        placeholders = self.placeholders()
        anchor = placeholders[-1].next if placeholders else next(iter(self.graph.nodes))
        with self.graph.inserting_before(anchor):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.signature = Signature((*self.signature.inputs, entry), self.signature.outputs)
        return node

    def infer(self, node: fx.Node) -> Any:
        """The value of ``node``, computed by running its operator on the fake values of its arguments."""

        def fake(argument: fx.Node) -> Any:
            return argument.meta["val"]

        args = fx.map_arg(node.args, fake)
        kwargs = fx.map_arg(node.kwargs, fake)
        with self.fake_mode, plain_execution():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        self._inferences[node] = Inference.of(node, value)
        return value

    def is_inferred(self, node: fx.Node) -> bool:
        """Whether the value of ``node`` is what its operator gave for the very arguments it has now."""
        inference = self._inferences.get(node)
        return inference is not None and inference.holds(node)

    def refresh(self) -> None:
        """Infer, in order, every value whose operator or arguments changed: views share the memory of their bases."""
        for node in self.ops():
            if self.is_inferred(node):
                continue
            earlier = self._inferences.get(node)
            if earlier is not None and earlier.value is not node.meta.get("val"):
                earlier = None  # somebody gave the node another value since
            self.infer(node)
            self._inferences[node] = self._inferences[node].after(earlier)
            node.meta["val"] = self._inferences[node].value

    def finish(self) -> None:
        """Drop constants that nothing reads."""
        read = {str(node.target) for node in self.constants()}
        for name in [name for name in self.module._buffers if name not in read]:
            delattr(self.module, name)

    # ---- whole ---------------------------------------------------------------------------------------------------

    def copy(self) -> Program:
        """An independent Program with the same text; constant tensors are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
            # Names are given, not derived: dumps and origins rely on them.
            twin = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            twin.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
            assert twin.name == node.name, f"the copy of {node.name} is called {twin.name}"
            mapping[node] = twin
        root = torch.nn.Module()
        for name, tensor in self.module._buffers.items():
            root.register_buffer(name, tensor, persistent=False)
        module = GraphHolder(root, graph)
        program = Program(module, self.signature, stage=self.stage, origins=self.origins, history=self.history)
        program.decisions = self.decisions
        program.precision = self.precision
        program.fp8 = self.fp8
        program._inferences = {mapping[node]: known for node, known in self._inferences.items() if node in mapping}
        return program

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs for ``inputs`` (in signature order), interpreted node by node without gradients."""
        if len(inputs) != len(self.signature.inputs):
            raise ProgramError(f"expected {len(self.signature.inputs)} inputs, came {len(inputs)}")
        with plain_execution():
            return tuple(fx.Interpreter(self.module).run(*inputs, enable_io_processing=False))

    def text(self) -> str:
        """The program as readable text that is also valid Python syntax."""
        from graphopt.ir.text import program_text

        return program_text(self)

    def __str__(self) -> str:
        return self.text()


def scalar_input(name: str, kind: Any, type_name: str = "float") -> Input:
    """An input that is a Python number."""
    return Input(name, kind, ScalarSpec(type_name))


def nodes_in(values: Iterable[Any]) -> tuple[fx.Node, ...]:
    """The nodes among ``values``, in order."""
    return tuple(value for value in values if isinstance(value, fx.Node))
