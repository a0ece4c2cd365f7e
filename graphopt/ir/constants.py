"""Values that a Program computes from constants alone, evaluated on demand with real tensors.

Placeholders are never constants: parameters and buffers change between steps, batches between calls. Nothing here
draws random numbers or reads uninitialised memory. Evaluation runs the very operators of the graph on their own device
and frees what it no longer needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.ambient import plain_execution
from graphopt.ir.fake import is_fake
from graphopt.ir.program import Program
from graphopt.ir.spec import InputKind

MAX_BYTES = 1 << 28
"""Bytes alive at once while one value is evaluated: 256 MiB, a mask of 16,384 x 16,384; above it, use blocks."""
MAX_OPS = 10_000
"""Operators run for one value; masks of transformers models take about 40."""
BLOCK_ELEMENTS = 1 << 22
"""Elements in one block: 32 MiB of int64, and a mask of 2,048 x 2,048 in one piece."""

_INPUT_WORDS = {
    InputKind.PARAM: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.STATE: "optimizer state",
    InputKind.SCALAR: "scalar",
    InputKind.TANGENT: "incoming gradient",
    InputKind.SEED: "random seed",
}

Window = tuple[slice, ...]


@dataclass(frozen=True)
class NotConstant:
    """A value that cannot be evaluated; ``reason`` continues a sentence that starts with the value's name."""

    reason: str


@dataclass(frozen=True)
class Block:
    """Part of a value: ``values[0, ..., 0]`` is the element at index ``start`` of the whole."""

    start: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class ConstantBlocks:
    """A constant value, computed block by block while iterating, so that a large one is never whole in memory.

    ``steps``: the broadcasting operators that end in the value, in order; ``leaves``: values of what they read.
    A block holds whole rows (the last dimension) and one index of every dimension before the last two. Dimensions
    before the last two along which the value merely repeats (stride 0) are visited once.
    """

    steps: tuple[fx.Node, ...]
    leaves: Mapping[fx.Node, Any]
    root: fx.Node

    def __iter__(self) -> Iterator[Block]:
        for window in _windows(self.root.meta["val"]):
            yield Block(tuple(part.start for part in window), self._evaluate(window))

    def _evaluate(self, window: Window) -> torch.Tensor:
        values = {node: _narrow(value, window) for node, value in self.leaves.items()}
        for node, unused in zip(self.steps, _unused_after(self.steps, self.root), strict=True):
            values[node] = _run_on_window(node, values, window)
            for spent in unused:
                values.pop(spent, None)
        result = values[self.root]
        assert isinstance(result, torch.Tensor), f"{self.root.name} is not a tensor"
        return result


class ConstantValues:
    """What a Program computes from constants alone; facts hold for the Program as it was when this was made."""

    def __init__(self, program: Program, *, max_bytes: int = MAX_BYTES, max_ops: int = MAX_OPS) -> None:
        self._program = program
        self._max_bytes = max_bytes
        self._max_ops = max_ops
        self._position = {node: i for i, node in enumerate(program.graph.nodes)}
        self._obstacles = _obstacles(program)
        self._values: dict[fx.Node, Any] = {}

    def why_not(self, node: fx.Node) -> str | None:
        """Why ``node`` is no constant (it names the first input it depends on), or None if it is. Runs nothing."""
        return self._obstacles.get(node)

    def value(self, node: fx.Node) -> Any | NotConstant:
        """The value of ``node``, evaluated once. Never write into it: it may be a tensor of the module."""
        if node not in self._values:
            self._values[node] = self._evaluate(node)
        return self._values[node]

    def blocks(self, node: fx.Node) -> ConstantBlocks | NotConstant:
        """The value of ``node``, one tensor, in blocks; only what feeds its last broadcasting operators is whole."""
        reason = self.why_not(node)
        if reason is not None:
            return NotConstant(reason)
        steps, leaf_nodes = self._split(node)
        leaves = {leaf: self.value(leaf) for leaf in leaf_nodes}
        refused = next((value for value in leaves.values() if isinstance(value, NotConstant)), None)
        return refused or ConstantBlocks(steps, leaves, node)

    def _split(self, root: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        """The broadcasting operators that end in ``root``, and what they read; both in graph order."""
        steps: set[fx.Node] = set()
        leaves: set[fx.Node] = set()
        pending = [root]
        while pending:
            node = pending.pop()
            if node in steps or node in leaves:
                continue
            if not _is_broadcasting(node):
                leaves.add(node)
                continue
            steps.add(node)
            pending.extend(node.all_input_nodes)
        return self._in_order(steps), self._in_order(leaves)

    def _in_order(self, nodes: set[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(nodes, key=self._position.__getitem__))

    def _evaluate(self, root: fx.Node) -> Any | NotConstant:
        reason = self.why_not(root)
        if reason is not None:
            return NotConstant(reason)
        order = self._needed_for(root)
        if len(order) > self._max_ops:
            return NotConstant(f"takes {len(order)} operators to evaluate, more than the limit of {self._max_ops}")
        values: dict[fx.Node, Any] = {}
        live_bytes = 0
        for node, unused in zip(order, _unused_after(order, root), strict=True):
            live_bytes += _fresh_bytes(node)
            if live_bytes > self._max_bytes:
                return NotConstant(f"takes {live_bytes} bytes to evaluate, more than the limit of {self._max_bytes}")
            try:
                values[node] = self._run(node, values)
            except (RuntimeError, AssertionError) as error:  # such as a device that this machine does not have
                return NotConstant(f"cannot be evaluated here: {error}")
            for spent in unused:
                live_bytes -= _fresh_bytes(spent) if spent in values else 0
                values.pop(spent, None)
        return values[root]

    def _needed_for(self, root: fx.Node) -> tuple[fx.Node, ...]:
        needed: set[fx.Node] = set()
        pending = [root]
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed.add(node)
            if not isinstance(self._values.get(node, NotConstant("")), NotConstant):
                continue
            pending.extend(argument for argument in _value_arguments(node))
        return self._in_order(needed)

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        known = self._values.get(node, NotConstant(""))
        if not isinstance(known, NotConstant):
            return known
        if node.op == "get_attr":
            return self._program.constant(node)

        def real(argument: fx.Node) -> Any:
            return values[argument] if argument in values else _blank_like(argument.meta["val"])

        with plain_execution():
            return node.target(*fx.map_arg(node.args, real), **fx.map_arg(node.kwargs, real))  # type: ignore[operator]


def _obstacles(program: Program) -> dict[fx.Node, str]:
    """For each node that is no constant, why."""
    found: dict[fx.Node, str] = {}
    for node, entry in zip(program.placeholders(), program.signature.inputs, strict=True):
        found[node] = f"depends on {_INPUT_WORDS.get(entry.kind, 'input')} {entry.name}"
    for node in program.constants():
        if is_fake(program.constant(node)):
            found[node] = f"depends on {node.target}, which has no content yet"
    for node in program.ops():
        inherited = (found[argument] for argument in _value_arguments(node) if argument in found)
        reason = _own_obstacle(node) or next(inherited, None)
        if reason is not None:
            found[node] = reason
    return found


def _own_obstacle(node: fx.Node) -> str | None:
    if ops.is_random(node):
        return f"is random (drawn by {node.name})"
    if ops.is_uninitialised(node):
        return f"depends on the uninitialised memory of {node.name}"
    return None if ops.is_pure(node) else f"depends on {node.name}, which has an effect"


def _value_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments whose content decides the result; a factory takes only shape and dtype from its tensors."""
    arguments = ops.tensor_arguments(node)
    if not ops.is_factory(node):
        return arguments
    return tuple(argument for argument in arguments if not isinstance(argument.meta.get("val"), torch.Tensor))


def _blank_like(fake: Any) -> Any:
    """A real tensor with the spec of ``fake`` and no content, for a factory to take its shape from."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _fresh_bytes(node: fx.Node) -> int:
    """Bytes that running ``node`` adds to what is held."""
    fake = node.meta.get("val")
    if node.op == "get_attr" or ops.is_view(node) or not isinstance(fake, torch.Tensor):
        return 0
    blanks = (argument.meta["val"] for argument in ops.tensor_arguments(node) if ops.is_factory(node))
    return int(fake.untyped_storage().nbytes()) + sum(int(blank.untyped_storage().nbytes()) for blank in blanks)


def _unused_after(order: Sequence[fx.Node], root: fx.Node) -> list[list[fx.Node]]:
    """For each position of ``order``, the nodes that nothing later in ``order`` reads."""
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(order):
        for argument in (node, *node.all_input_nodes):
            last[argument] = position
    unused: list[list[fx.Node]] = [[] for _ in order]
    for node, position in last.items():
        if node is not root:
            unused[position].append(node)
    return unused


def _is_broadcasting(node: fx.Node) -> bool:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return ops.is_pointwise(node) or ops.is_conversion(node) or ops.is_expand(node)


def _windows(fake: torch.Tensor) -> Iterator[Window]:
    """Windows of whole rows that cover ``fake``, in order; leading dimensions of stride 0 are visited once."""
    if fake.dim() < 2:
        yield tuple(slice(0, size) for size in fake.shape)
        return
    num_rows, num_columns = fake.shape[-2:]
    step = max(1, BLOCK_ELEMENTS // max(1, num_columns))
    leading = [
        range(1 if stride == 0 else size) for size, stride in zip(fake.shape[:-2], fake.stride()[:-2], strict=True)
    ]
    for index in itertools.product(*leading):
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            yield (*(slice(i, i + 1) for i in index), rows, slice(0, num_columns))


def _narrow(value: Any, window: Window) -> Any:
    """The part of ``value`` that broadcasts to ``window``: dimensions of size 1 stay whole."""
    if not isinstance(value, torch.Tensor):
        return value
    aligned = window[len(window) - value.dim() :]
    return value[tuple(slice(None) if size == 1 else part for size, part in zip(value.shape, aligned, strict=True))]


def _run_on_window(node: fx.Node, values: Mapping[fx.Node, Any], window: Window) -> Any:
    if ops.is_expand(node):
        shape = node.meta["val"].shape
        aligned = window[len(window) - len(shape) :]
        sizes = [1 if size == 1 else part.stop - part.start for size, part in zip(shape, aligned, strict=True)]
        return values[node.all_input_nodes[0]].expand(sizes)
    with plain_execution():
        args = fx.map_arg(node.args, values.__getitem__)
        return node.target(*args, **fx.map_arg(node.kwargs, values.__getitem__))  # type: ignore[operator]
