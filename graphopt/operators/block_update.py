"""Updates of block-INT8 optimizers as operators: Adam and Lion, functional, in place, and in place for a whole list.

``graphopt::block_adam`` gives new tensors, ``block_adam_`` writes into its own, ``block_adam_list_`` does so for a list
of parameters in one launch; ``block_lion`` likewise. The formulas, and what each argument means, stand in
``graphopt.kernels.block_adam``, ``block_lion`` and ``block_update``. ``step`` counts from 1. Arguments, as the schemas
list them::

    parameter, gradient, the rule's state, factor, the rule's numbers, block, map, the rule's switches, seed, offset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphopt.kernels import block_adam as adam_kernel
from graphopt.kernels import block_lion as lion_kernel
from graphopt.kernels.block_update import BlockItem, BlockOptions, Moment


@dataclass(frozen=True)
class _Rule:
    """Names of a rule's arguments. ``state``: codes, each followed by its scales; ``run`` updates items in place."""

    state: tuple[str, ...]
    numbers: tuple[str, ...]
    switches: tuple[str, ...]
    run: Callable[[Sequence[BlockItem], Mapping[str, float], BlockOptions, Tensor | None], None]

    @property
    def written(self) -> tuple[str, ...]:
        """What an update writes."""
        return ("parameter", *self.state)

    def schema(self, *, writes: bool, lists: bool = False) -> str:
        """The schema of an operator that writes its arguments, or of one that gives new values of them."""
        ending, many = ("s", "[]") if lists else ("", "")
        parts = []
        for position, name in enumerate(("parameter", "gradient", *self.state)):
            alias = f"(a{position}!)" if writes and name in self.written else ""
            parts.append(f"Tensor{alias}{many} {name}{ending}")
        parts += ["Tensor? factor", *(f"float {name}" for name in self.numbers), "SymInt block", "str map"]
        parts += [f"bool {name}" for name in self.switches]
        parts += [f"SymInt{many} {name}{ending}" for name in ("seed", "offset")]
        results = "" if writes else ", ".join("Tensor" for _ in self.written)
        return f"({', '.join(parts)}) -> ({results})"

    def update_list(self, arguments: Sequence[Any]) -> None:
        """Update all parameters of the lists in one launch, in place."""
        num_tensors = 2 + len(self.state)
        factor, *rest = arguments[num_tensors:]
        numbers, (block, map_name, *switches) = rest[: len(self.numbers)], rest[len(self.numbers) : -2]
        options = BlockOptions(block, map_name, **dict(zip(self.switches, switches, strict=True)))
        items = [
            BlockItem(parameter, gradient, _moments(state), seed, offset)
            for parameter, gradient, *state, seed, offset in zip(*arguments[:num_tensors], *arguments[-2:], strict=True)
        ]
        self.run(items, dict(zip(self.numbers, numbers, strict=True)), options, factor)

    def update_one(self, arguments: Sequence[Any]) -> None:
        """Update one parameter in place, without memory of its own (but for a gradient of another layout)."""
        num_tensors = 2 + len(self.state)
        lists = [[argument] for argument in arguments[:num_tensors]]
        self.update_list([*lists, *arguments[num_tensors:-2], *([argument] for argument in arguments[-2:])])

    def updated(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """The new parameter and its new state."""
        parameter, gradient, *rest = arguments
        new = [tensor.clone() for tensor in (parameter, *rest[: len(self.state)])]
        self.update_one([new[0], gradient, *new[1:], *rest[len(self.state) :]])
        return tuple(new)

    def fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        """What ``updated`` gives, without numbers."""
        parameter, _, *state = arguments[: 2 + len(self.state)]
        return tuple(torch.empty_like(tensor) for tensor in (parameter, *state))


def _moments(state: Sequence[Tensor]) -> tuple[Moment, ...]:
    return tuple(Moment(*pair) for pair in zip(state[::2], state[1::2], strict=True))


def _run_adam(
    items: Sequence[BlockItem], numbers: Mapping[str, float], options: BlockOptions, factor: Tensor | None
) -> None:
    scalars = adam_kernel.AdamScalars.of(**numbers)
    adam_kernel.update_(items, scalars, options, factor=factor, step=numbers["step"])


def _run_lion(
    items: Sequence[BlockItem], numbers: Mapping[str, float], options: BlockOptions, factor: Tensor | None
) -> None:
    scalars = lion_kernel.LionScalars.of(**{name: value for name, value in numbers.items() if name != "step"})
    lion_kernel.update_(items, scalars, options, factor=factor, step=numbers["step"])


def _register(name: str, rule: _Rule) -> tuple[Any, Any, Any]:
    """The operators of ``rule``, registered: the one that gives new values, in place, and in place for lists."""

    def update_list(*arguments: Any) -> None:
        rule.update_list(arguments)

    def update_one(*arguments: Any) -> None:
        rule.update_one(arguments)

    def updated(*arguments: Any) -> tuple[Tensor, ...]:
        return rule.updated(arguments)

    def nothing(*_: Any) -> None:
        """An update in place makes no tensor."""

    define = torch.library.custom_op
    listed = tuple(f"{argument}s" for argument in rule.written)
    new = define(name, updated, mutates_args=(), schema=rule.schema(writes=False))
    one = define(f"{name}_", update_one, mutates_args=rule.written, schema=rule.schema(writes=True))
    many = define(f"{name}_list_", update_list, mutates_args=listed, schema=rule.schema(writes=True, lists=True))
    new.register_fake(rule.fake)
    one.register_fake(nothing)
    many.register_fake(nothing)
    return new, one, many


block_adam, block_adam_, block_adam_list_ = _register(
    "graphopt::block_adam",
    _Rule(
        state=("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
        numbers=("lr", "weight_decay", "beta1", "beta2", "eps", "step"),
        switches=("decoupled", "stochastic_state", "stochastic_weight"),
        run=_run_adam,
    ),
)
block_lion, block_lion_, block_lion_list_ = _register(
    "graphopt::block_lion",
    _Rule(
        state=("exp_avg", "exp_avg_scale"),
        numbers=("lr", "weight_decay", "beta1", "beta2", "step"),
        switches=("decoupled", "stochastic_weight"),
        run=_run_lion,
    ),
)
