"""``dst.copy_(src)`` with a source of another shape or dtype: torch's functionalisation takes ``src`` as it is.

A buffer written so would come back with the source's shape. This makes the broadcast and the cast explicit.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def broadcast_copies(module: fx.GraphModule) -> None:
    """Let the source of every ``copy_`` have the dtype and the shape of its destination, in place."""
    for node in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
        destination, source = node.args[0].meta.get("val"), node.args[1]
        if not isinstance(destination, torch.Tensor) or not isinstance(source, fx.Node):
            continue
        with module.graph.inserting_before(node):
            if source.meta["val"].dtype != destination.dtype:
                source = _call(node, aten._to_copy.default, source, dtype=destination.dtype)
            if source.meta["val"].shape != destination.shape:
                source = _call(node, aten.expand.default, source, list(destination.shape))
        node.update_arg(1, source)
    module.recompile()


def _call(copy: fx.Node, target: torch._ops.OpOverload, source: fx.Node, *args: object, **kwargs: object) -> fx.Node:
    twin = copy.graph.call_function(target, (source, *args), kwargs)  # type: ignore[arg-type]
    twin.meta = dict(copy.meta)
    value = source.meta["val"]
    with value.fake_mode:
        twin.meta["val"] = target(value, *args, **kwargs)
    return twin
