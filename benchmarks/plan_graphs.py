"""Small graphs of training steps as arrays, for comparing plans with proven optima.

A node makes one value. The first ``first_late`` nodes are the forward part; nodes run in order, read what their
arguments made, and hold it while they run. Seconds are whole microseconds, so that solvers count in integers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from graphopt.planner.step_graph import StepGraph


@dataclass(frozen=True)
class PlanGraph:
    """``arguments[i]``: earlier nodes that node i reads; ``micros[i]``: its cost; ``nbytes[i]``: bytes of its value;
    ``fixed``: nodes that must not run again; ``returned``: those whose values are held to the end."""

    name: str
    arguments: tuple[tuple[int, ...], ...]
    micros: tuple[int, ...]
    nbytes: tuple[int, ...]
    first_late: int
    fixed: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, forward and backward."""
        return len(self.arguments)

    def step_graph(self) -> StepGraph:
        """The same graph as the planner takes it; no call writes into its arguments."""
        num, graph = self.num_nodes, fx.Graph()
        each = tuple((i,) for i in range(num))
        nodes = tuple(graph.placeholder(f"node_{i}") for i in range(num))
        return StepGraph(
            nodes=nodes,
            is_call=(True,) * num,
            arguments=self.arguments,
            held=each,
            made=each,
            maker=tuple(range(num)),
            value=tuple(range(num)),
            nbytes=self.nbytes,
            resident=(False,) * num,
            overwritten=frozenset(),
            guarded=frozenset(),
            returned=self.returned,
            writes=(),
            reusable=((),) * num,
            updated=((),) * num,
            repeatable=tuple(i not in self.fixed for i in range(num)),
            seconds=tuple(micros * 1e-6 for micros in self.micros),
            workspace=(0,) * num,
            first_late=self.first_late,
            resident_bytes=0,
            index={node: i for i, node in enumerate(nodes)},
        )


class Sketch:
    """A forward part under construction; ``differentiate`` adds the backward part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments: list[tuple[int, ...]] = []
        self.micros: list[int] = []
        self.nbytes: list[int] = []
        self.keeps_output: list[bool] = []
        self.fixed: set[int] = set()

    def add(self, *arguments: int, micros: int, nbytes: int, by_output: bool = False, fixed: bool = False) -> int:
        """A forward node; its gradient reads the node's value if ``by_output``, else its arguments."""
        self.arguments.append(arguments)
        self.micros.append(micros)
        self.nbytes.append(nbytes)
        self.keeps_output.append(by_output)
        if fixed:
            self.fixed.add(len(self.arguments) - 1)
        return len(self.arguments) - 1

    def differentiate(self) -> PlanGraph:
        """The graph with a backward node for each forward node, in reverse: it reads the gradients of the node's users
        and what the node saved, and makes a gradient of the size of the node's arguments. Gradients that nothing reads
        are returned, as is the last forward value."""
        num = len(self.arguments)
        users: list[list[int]] = [[] for _ in range(num)]
        for i, arguments in enumerate(self.arguments):
            for a in arguments:
                users[a].append(i)
        gradient: dict[int, int] = {}
        arguments, micros, nbytes = list(self.arguments), list(self.micros), list(self.nbytes)
        for i in range(num - 1, -1, -1):
            if i in self.fixed and not self.arguments[i]:
                continue  # a drawn mask has no gradient
            saved = (i,) if self.keeps_output[i] or not self.arguments[i] else self.arguments[i]
            gradient[i] = len(arguments)
            arguments.append(tuple(sorted({*saved, *(gradient[user] for user in users[i])})))
            micros.append(2 * self.micros[i])
            nbytes.append(sum(self.nbytes[a] for a in self.arguments[i]) or self.nbytes[i])
        unread = set(range(len(arguments))) - {a for read in arguments for a in read}
        returned = frozenset({num - 1, *unread})
        return PlanGraph(
            self.name, tuple(arguments), tuple(micros), tuple(nbytes), num, frozenset(self.fixed), returned
        )


def chain(num: int, *, name: str = "chain", seed: int | None = None, skip: int = 0) -> PlanGraph:
    """``num`` nodes, each reading the one before (and the one ``skip`` before); costs and sizes alike or random."""
    sketch, draw = Sketch(f"{name}-{num}"), random.Random(seed)
    for i in range(num):
        micros, nbytes = (10, 8) if seed is None else (draw.randint(2, 30), draw.randint(1, 16))
        before = (i - 1,) if i else ()
        far = (i - skip,) if skip and i >= skip and i % skip == 0 else ()
        sketch.add(*far, *before, micros=micros, nbytes=nbytes)
    return sketch.differentiate()


def u_net(depth: int) -> PlanGraph:
    """Halving down, doubling up, every level's value read again on the way up."""
    sketch, skips, h = Sketch(f"u-net-{depth}"), [], -1
    for level in range(depth):
        size = 64 >> level
        h = sketch.add(*((h,) if h >= 0 else ()), micros=24, nbytes=size)
        h = sketch.add(h, micros=6, nbytes=size, by_output=True)
        skips.append(h)
    for level in range(depth - 2, -1, -1):
        size = 64 >> level
        h = sketch.add(h, skips[level], micros=30, nbytes=size)
        h = sketch.add(h, micros=6, nbytes=size, by_output=True)
    return sketch.differentiate()


def encoder_decoder(depth: int) -> PlanGraph:
    """``depth`` encoder layers; the result is read by every one of ``depth`` decoder layers."""
    sketch, h = Sketch(f"encoder-decoder-{depth}"), -1
    for _ in range(depth):
        h = sketch.add(*((h,) if h >= 0 else ()), micros=20, nbytes=12)
        h = sketch.add(h, micros=5, nbytes=24, by_output=True)
    memory, h = h, sketch.add(micros=3, nbytes=8)
    for _ in range(depth):
        h = sketch.add(h, memory, micros=25, nbytes=10)
        h = sketch.add(h, micros=6, nbytes=20)
    return sketch.differentiate()


def transformer(depth: int, *, name: str = "transformer", dropout: bool = False, vocabulary: int = 0) -> PlanGraph:
    """Norm, attention, sum, norm, wide layer, activation, sum; with dropout masks that cannot be drawn again, or with
    a head whose logits hold ``vocabulary`` bytes and whose weight is the embedding's."""
    sketch = Sketch(f"{name}-{depth}")
    embedding = h = sketch.add(micros=4, nbytes=8)
    for _ in range(depth):
        normed = sketch.add(h, micros=3, nbytes=8)
        attended = sketch.add(normed, micros=40, nbytes=10)
        if dropout:
            mask = sketch.add(micros=4, nbytes=2, fixed=True)
            attended = sketch.add(attended, mask, micros=3, nbytes=8)
        h = sketch.add(h, attended, micros=3, nbytes=8)
        wide = sketch.add(h, micros=45, nbytes=32)
        active = sketch.add(wide, micros=9, nbytes=32)
        h = sketch.add(h, active, micros=45, nbytes=8)
    if vocabulary:
        logits = sketch.add(h, embedding, micros=60, nbytes=vocabulary)
        h = sketch.add(logits, micros=12, nbytes=vocabulary, by_output=True)
    sketch.add(h, micros=2, nbytes=1)
    return sketch.differentiate()


def dense(num: int) -> PlanGraph:
    """Every node reads the three before it, as densely connected layers do."""
    sketch = Sketch(f"dense-{num}")
    for i in range(num):
        sketch.add(*range(max(0, i - 3), i), micros=8 + 5 * (i % 4), nbytes=6 + 3 * (i % 3))
    return sketch.differentiate()


def two_towers(depth: int) -> PlanGraph:
    """Two chains of unlike sizes that meet in one value."""
    sketch, tops = Sketch(f"two-towers-{depth}"), []
    for size in (6, 14):
        h = sketch.add(micros=4, nbytes=size)
        for n in range(depth):
            h = sketch.add(h, micros=10 + size * (n % 2), nbytes=size)
        tops.append(h)
    sketch.add(*tops, micros=8, nbytes=4)
    return sketch.differentiate()


SKETCHED: tuple[Callable[[], PlanGraph], ...] = (
    lambda: chain(12),
    lambda: chain(16, name="uneven-chain", seed=1),
    lambda: chain(14, name="skips", seed=2, skip=3),
    lambda: chain(18, name="residual", skip=2),
    lambda: u_net(4),
    lambda: encoder_decoder(4),
    lambda: transformer(2),
    lambda: transformer(2, name="dropout", dropout=True),
    lambda: transformer(1, name="tied-head", vocabulary=40),
    lambda: transformer(2, name="big-vocabulary", vocabulary=400),
    lambda: dense(14),
    lambda: two_towers(6),
)
