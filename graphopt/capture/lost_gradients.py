"""Writes that eager autograd does not see: under ``no_grad`` or through ``detach()``, into a value with a gradient.

In eager the value changes and its gradient stays as if it had not; a functional graph has one value for both. Such
writes are refused; writes into buffers, and into values that nobody uses afterwards, are fine.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from graphopt.capture.grad_mode import InlinedRegions
from graphopt.capture.origins import user_frame
from graphopt.errors import CaptureError
from graphopt.ir import ops

aten = torch.ops.aten

# Takes a shape alone from its argument, no gradient.
_LIKE = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_empty.default,
        aten.new_full.default,
    }
)


def refuse_lost_gradients(graph: fx.Graph, regions: InlinedRegions, sources: Collection[str]) -> None:
    """Raise CaptureError at the first unseen write. ``sources``: names of the placeholders that take gradients."""
    storages = _Storages(regions)
    carrying = {node for node in graph.find_nodes(op="placeholder") if node.name in sources}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for written in ops.mutated_arguments(node) if ops.is_mutating(node) else ():
            root, is_detached = storages.root(written)
            is_unseen = is_detached or node in regions.inside
            if is_unseen and root.op != "placeholder" and root in carrying and storages.used_after(root, node):
                raise CaptureError(_message(node, is_detached))
            if not is_unseen and _any_carries(node, carrying, storages):
                carrying.add(root)
        if node not in regions.inside and _is_float(node) and _any_carries(node, carrying, storages):
            carrying.add(node)


class _Storages:
    """Which node first made the memory that a node's value lives in."""

    def __init__(self, regions: InlinedRegions) -> None:
        self.regions = regions

    def root(self, node: fx.Node) -> tuple[fx.Node, bool]:
        """The first node with this memory, and whether a ``detach`` of the user lies between."""
        is_detached = False
        while node.op == "call_function" and _shares_first_argument(node):
            is_detached |= ops.is_call(node, aten.detach.default) and node not in self.regions.leaving
            node = node.args[0]  # type: ignore[assignment]
        return node, is_detached

    def used_after(self, root: fx.Node, write: fx.Node) -> bool:
        """Whether anything behind ``write`` reads the memory of ``root`` with its gradient."""
        user = write.next
        while user.op != "root":
            reads = not _shares_first_argument(user) and user not in self.regions.inside
            if reads and any(self.root(source) == (root, False) for source in user.all_input_nodes):
                return True
            user = user.next
        return False


def _shares_first_argument(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return node.target is operator.getitem or ops.is_view(node) or ops.is_mutating(node)


def _any_carries(node: fx.Node, carrying: Collection[fx.Node], storages: _Storages) -> bool:
    if ops.is_call(node, aten.detach.default) or ops.is_factory(node) or ops.overload(node) in _LIKE:
        return False
    for source in node.all_input_nodes:
        root, is_detached = storages.root(source)
        if source in carrying or (root in carrying and not is_detached and source not in storages.regions.leaving):
            return True
    return False


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [item for item in values if isinstance(item, torch.Tensor)]
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _message(node: fx.Node, is_detached: bool) -> str:
    where, code = user_frame(node.meta.get("stack_trace") or "")
    how = "through .detach()" if is_detached else "under torch.no_grad()"
    return (
        f"a value that a parameter's gradient flows through is written {how} at\n  {where or 'unknown line'}: {code}\n"
        "eager changes the value and keeps the gradient of the old one, which a graph cannot express; what to do: "
        "use an operator that is not in place (y = y * 2), or clone the value first (y.detach().clone())"
    )
