"""The flow of values through a Program as a networkx graph, for questions about reachability."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from torch import fx

from graphopt.ir.program import Program


def dataflow(program: Program) -> nx.DiGraph:
    """A directed graph over the nodes of ``program``: an edge from each argument to its user."""
    graph = nx.DiGraph()
    graph.add_nodes_from(program.graph.nodes)
    graph.add_edges_from((argument, node) for node in program.graph.nodes for argument in node.all_input_nodes)
    return graph


def depends_on(program: Program, node: fx.Node, sources: Iterable[fx.Node]) -> bool:
    """Whether ``node`` is one of ``sources`` or computed from one of them."""
    wanted = set(sources)
    return node in wanted or not wanted.isdisjoint(nx.ancestors(dataflow(program), node))
