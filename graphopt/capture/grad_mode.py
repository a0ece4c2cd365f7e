"""Regions under ``torch.no_grad()``: inlined, with what leaves them detached.

torch's own decomposition step inlines such a region and forgets that no gradient flows through it; the gradients that
follow are silently wrong (seen with torch 2.13). This runs before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt.capture.origins import user_frame
from graphopt.errors import CaptureError

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


@dataclass(frozen=True)
class InlinedRegions:
    """Nodes that stood ``inside`` a no_grad region, and the detaches put on what was ``leaving`` one."""

    inside: set[fx.Node] = field(default_factory=set)
    leaving: set[fx.Node] = field(default_factory=set)


def inline_grad_mode_regions(module: fx.GraphModule) -> InlinedRegions:
    """Replace every grad-mode region of an exported graph by its operators; no_grad results are detached.

    Returns the nodes concerned.
    """
    regions = InlinedRegions()
    _inline_regions(module, regions, inside_no_grad=False)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    module.recompile()
    return regions


def _inline_regions(module: fx.GraphModule, regions: InlinedRegions, *, inside_no_grad: bool) -> None:
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not _REGION:
            continue
        enabled, body_node, *arguments = node.args
        body = getattr(module, body_node.target)
        if enabled and inside_no_grad:
            raise CaptureError(
                f"torch.enable_grad() inside torch.no_grad() at {_where(body)} cannot be captured; "
                "move the differentiable part out of the no_grad region"
            )
        _inline_regions(body, regions, inside_no_grad=inside_no_grad or not enabled)
        inlined, detached = _inline(module.graph, node, body, arguments, detach=not enabled)
        if not enabled:
            regions.inside.update(inlined)
            regions.leaving.update(detached)


def _inline(
    graph: fx.Graph, call: fx.Node, body: fx.GraphModule, arguments: Any, *, detach: bool
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The operators now in ``graph``, and the detaches behind them."""
    placeholders = body.graph.find_nodes(op="placeholder")
    mapping: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
    owner = graph.owning_module
    assert owner is not None, "an exported graph has an owning module"
    results: Any = ()
    inlined = []
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                results = fx.map_arg(node.args[0], mapping.__getitem__)
                continue
            twin = graph.node_copy(node, mapping.__getitem__)
            if node.op == "get_attr":
                twin.target = _adopt(owner, body, str(node.target))
            mapping[node] = twin
            inlined.append(twin)
        outer = [_detached(graph, value) if detach else value for value in results]
    for user in list(call.users):
        user.replace_all_uses_with(outer[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(call)
    detached = [new for new, value in zip(outer, results, strict=True) if isinstance(new, fx.Node) and new is not value]
    return inlined, detached


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    tensor = value.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _adopt(owner: fx.GraphModule, body: fx.GraphModule, target: str) -> str:
    name = next(f"{target}_{i}" for i in range(10**9) if not hasattr(owner, f"{target}_{i}"))
    setattr(owner, name, getattr(body, target))
    return name


def _where(body: fx.GraphModule) -> str:
    traces = (node.meta.get("stack_trace") for node in body.graph.nodes)
    return next((user_frame(trace)[0] for trace in traces if trace), "an unknown line")
