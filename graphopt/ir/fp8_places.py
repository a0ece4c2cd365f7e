"""Where in a model a product stands: at the head, in a router, in a first or last layer. Such layers are often left in
two bytes, whatever they cost: their errors are not averaged away by what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from graphopt.ir import ops
from graphopt.ir.liveness import backward_nodes
from graphopt.ir.logits import logit_source
from graphopt.ir.module_paths import numbered_prefixes
from graphopt.ir.precision_ops import qualified_name
from graphopt.ir.program import Program
from graphopt.ir.spec import OutputKind

_HEADS_ANYWHERE = frozenset({"lm_head"})
_HEADS_AT_THE_END = frozenset({"classifier", "score", "embed_out"})
"""Alone: ``classifier.1`` is a hidden layer of a network that is called so."""

_CLASS_LOSSES = frozenset(
    f"aten::{name}" for name in ("_log_softmax", "log_softmax", "cross_entropy_loss", "logsumexp", "nll_loss")
)
_SOFTMAXES = frozenset({"aten::_softmax", "aten::softmax", "aten::_safe_softmax"})
_SELECTIONS = frozenset(f"aten::{name}" for name in ("topk", "sort", "argmax", "argsort"))

_MOST_EXPERTS = 512
"""Columns of a gating product at most: public models have up to 512 experts."""
_MOST_STEPS = 16


class Places:
    """Answers for one program; ``product`` is always the forward product of a layer."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._backward = backward_nodes(program)
        self._logits = {
            value: output.name
            for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
            if isinstance(value, fx.Node) and output.kind is OutputKind.USER and output.name.endswith("logits")
        }

    def head(self, product: fx.Node) -> str:
        """Why ``product`` is a head; empty if it is none."""
        parts = self._program.origin(product).module.split(".")
        named = next((part for part in parts if part in _HEADS_ANYWHERE), "")
        named = named or (parts[-1] if parts[-1] in _HEADS_AT_THE_END else "")
        if named:
            return f"head: called {named}"
        for value in self._arrangements(product):
            if value in self._logits:
                return f"head: its result is the output {self._logits[value]!r}"
            if any(self._reads_first(user, value, _CLASS_LOSSES) for user in value.users):
                return "head: its result goes into the loss over classes"
        return ""

    def router(self, product: fx.Node) -> str:
        """Why ``product`` is a router or another gate over few columns; empty if it is none."""
        num_columns = self._program.spec(product).shape[-1]
        if num_columns > _MOST_EXPERTS:
            return ""
        for value in self._arrangements(product):
            if any(self._reads_first(user, value, _SOFTMAXES) for user in value.users):
                return f"router: its result goes into a softmax over {num_columns} columns"
            if self._is_selected_from(value):
                return f"router: the largest of its {num_columns} columns are chosen"
        return ""

    def _arrangements(self, product: fx.Node) -> Iterator[fx.Node]:
        """``product`` and what holds its numbers column by column: views, casts, with a bias, scaled, capped."""
        found, seen = [product], {product}
        for value in found:
            yield value
            if len(found) > _MOST_STEPS:
                return
            for user in value.users:
                if user not in seen and user not in self._backward and self._keeps_columns(user, value):
                    seen.add(user)
                    found.append(user)

    def _keeps_columns(self, user: fx.Node, value: fx.Node) -> bool:
        if user.op != "call_function":
            return False
        if logit_source(self._program, user) is value:
            return True
        return ops.arithmetic(user) == "add" and self._program.spec(user).shape == self._program.spec(value).shape

    def _is_selected_from(self, value: fx.Node) -> bool:
        """Whether the largest of ``value`` are chosen, perhaps of its sigmoid with a bias added."""
        found, seen = [value], {value}
        for item in found:
            if len(found) > _MOST_STEPS:
                return False
            for user in item.users:
                if self._reads_first(user, item, _SELECTIONS):
                    return True
                if user.op == "call_function" and ops.is_pointwise(user) and user not in self._backward | seen:
                    seen.add(user)
                    found.append(user)
        return False

    def _reads_first(self, user: fx.Node, value: fx.Node, names: frozenset[str]) -> bool:
        return (
            user.op == "call_function"
            and qualified_name(user) in names
            and user.args[0] is value
            and user not in self._backward
        )


def edge_layers(modules: Iterable[str], *, first: int, last: int) -> dict[str, str]:
    """The first and last of the repeated layers that ``modules`` lie in, by path, with the reason to skip them.

    Layers are told by numbers in paths; each stack of them (an encoder's, a decoder's) has its own ends.
    """
    if not first and not last:
        return {}
    found: dict[str, str] = {}
    for layers in _stacks(modules).values():
        found |= {path: f"among the first {first} of {len(layers)} layers (skip_first)" for path in layers[:first]}
        tail = layers[len(layers) - last :] if last else []
        found |= {path: f"among the last {last} of {len(layers)} layers (skip_last)" for path in tail}
    return found


def edge_layer_of(module: str, edges: dict[str, str]) -> str:
    """The reason to skip ``module``; empty where there is none."""
    return next((edges[path] for path in numbered_prefixes(module) if path in edges), "")


def _stacks(modules: Iterable[str]) -> dict[str, list[str]]:
    """Paths of layers by the path of their stack, in order of first appearance; the outermost that repeats counts."""
    paths = list(dict.fromkeys(modules))
    for level in range(max((len(numbered_prefixes(path)) for path in paths), default=0)):
        at_level = dict.fromkeys(prefixes[level] for prefixes in map(numbered_prefixes, paths) if len(prefixes) > level)
        stacks: dict[str, list[str]] = {}
        for path in at_level:
            stacks.setdefault(path.rpartition(".")[0], []).append(path)
        repeated = {stack: layers for stack, layers in stacks.items() if len(layers) > 1}
        if repeated:
            return repeated
    return {}
