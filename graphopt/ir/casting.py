"""Values of a Program in more than one dtype: each made once, cast at most once for each dtype, for all its readers."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.program import Program

aten = torch.ops.aten


class Casts:
    """Gives a node in the dtype that a reader wants, and remembers the cast for the next reader.

    For passes that walk a Program in graph order. ``num_made`` counts the nodes that were added.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._copies: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._stand_in: dict[fx.Node, fx.Node] = {}
        self.num_made = 0

    def stand_in(self, node: fx.Node) -> fx.Node:
        """What is read in the place of ``node``."""
        return self._stand_in.get(node, node)

    def know(self, node: fx.Node, copy: fx.Node) -> None:
        """Say that ``copy`` holds ``node`` in another dtype, made by the program itself."""
        self._copies.setdefault((self.stand_in(node), self._program.spec(copy).dtype), copy)

    def get(self, node: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        """``node`` in ``dtype``, cast before ``reader`` if it has not been cast yet."""
        node = self.stand_in(node)
        if self._program.spec(node).dtype == dtype:
            return node
        found = self._copies.get((node, dtype))
        if found is None:
            found = self._viewed_copy(node, dtype, reader) or self._cast(node, dtype, reader)
            self._copies[node, dtype] = found
        return found

    def settle(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The cast of ``node`` to ``dtype``, right behind it, which all later readers get in its place."""
        cast = self._copies.get((node, dtype)) or self._cast(node, dtype, node.next, origin_of=node)
        self._stand_in[node] = cast
        return cast

    def _cast(self, node: fx.Node, dtype: torch.dtype, reader: fx.Node, *, origin_of: fx.Node | None = None) -> fx.Node:
        self.num_made += 1
        return self._program.insert_before(reader, aten._to_copy.default, node, dtype=dtype, origin_of=origin_of)

    def _viewed_copy(self, node: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node | None:
        """The view that ``node`` is, of a cast of its base: other views of the base then share the cast."""
        if not ops.is_view(node) or len(node.all_input_nodes) != 1:
            return None
        base = node.args[0]
        shown = self._program.value(node)
        if not isinstance(base, fx.Node) or not isinstance(shown, torch.Tensor):
            return None
        source = self._program.value(base)
        if not isinstance(source, torch.Tensor) or source.numel() > shown.numel() or source.dtype != shown.dtype:
            return None
        assert callable(node.target), f"{node.name} calls no operator"
        self.num_made += 1
        cast = self.get(base, dtype, reader)
        return self._program.insert_before(reader, node.target, cast, *node.args[1:], origin_of=node, **node.kwargs)
