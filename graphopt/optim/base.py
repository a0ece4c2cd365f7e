"""What an optimizer is to the compiler: options by group, named state, and a rule written in ATen operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from graphopt.errors import UnsupportedError
from graphopt.ir.units import parse_bytes
from graphopt.optim.state import PLAIN_FORMATS, ParameterFacts, StateChoice, checked_state

Number = Any
"""A Python number while options are read, a graph node of one while the rule is written."""


class Emit(Protocol):
    """Appends an operator to the graph and returns its node."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...


@dataclass(frozen=True)
class ParameterUpdate:
    """What a rule gets for one parameter: its node, its gradient, its state by name, and the group's numbers.

    A rule in ATen gets all in one dtype, the gradient scaled. A rule by blocks gets them as they are, with what the
    gradient is still to be multiplied by: ``factor``, one float32 (None: nothing). ``seed`` and ``offset``: of the
    random numbers of its elements; ``rounds_stochastically``: whether the new parameter is rounded by chance.
    """

    parameter: fx.Node
    gradient: fx.Node
    state: Mapping[str, fx.Node]
    numbers: Mapping[str, Number]
    factor: fx.Node | None = None
    seed: Number = 0
    offset: Number = 0
    rounds_stochastically: bool = False


@dataclass(frozen=True)
class UpdateResult:
    """The new parameter and the new state by name."""

    parameter: fx.Node
    state: Mapping[str, fx.Node]


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Base of all optimizers. ``groups``: dicts with ``params`` (name patterns, parameters or a predicate) and options.

    Options have the names of ``torch.optim`` and live in ``step.optimizer.param_groups``, where they can be changed at
    any time: they enter the graph as numbers.

    ``paged``: the state lies outside ordinary memory (CPU: in a memory-mapped file in the folder ``page_dir``, default
    that of temporary files; CUDA: in page-locked memory of the host) and streams in by ranges for the update.
    ``page_limit``: how many bytes of it, as a number or text such as "64MiB", may stay in ordinary memory.
    """

    lr: float
    groups: tuple[Mapping[str, Any], ...] = ()
    maximize: bool = False
    state: str = "parameter"
    paged: bool = False
    page_limit: int | str = 0
    page_dir: str | None = None

    counts_steps: ClassVar[bool] = True
    """Whether ``step`` is part of the state, as in torch's Adam."""
    state_choices: ClassVar[tuple[str, ...]] = ("parameter", "fp32", "bf16")
    """What ``state`` may be: as torch keeps it, in the parameter's dtype, or in another."""
    unsigned_state: ClassVar[frozenset[str]] = frozenset()
    """Names of state that is never negative."""
    takes_complex: ClassVar[bool] = False
    """Whether the rule is right for complex parameters too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.maximize:
            raise UnsupportedError("maximize=True is not supported: negate the loss instead")
        self._check(self.options())
        checked_page_limit(self.page_limit)
        for group in self.groups:
            self._check_group(group)

    def options(self) -> dict[str, Any]:
        """The options of a group by their names in ``torch.optim``."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_OPTIONS}

    def without_groups(self) -> Optimizer:
        """The same rule under other numbers and for no parameter in particular."""
        return replace(self, groups=(), lr=0.0, paged=False, page_limit=0, page_dir=None)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        options = self.options()
        unknown = sorted(set(group) - set(options) - {"params", "name"})
        if "params" not in group or unknown:
            raise UnsupportedError(f"a group needs 'params' and options out of {sorted(options)}; came {sorted(group)}")
        self._check({**options, **{key: value for key, value in group.items() if key in options}})

    def _check(self, options: Mapping[str, Any]) -> None:
        checked_state(options["state"], self.state_choices)
        self.check_options(options)

    @abstractmethod
    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an option out of range."""

    @abstractmethod
    def state_names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the state tensors of a parameter under ``options``, each of the parameter's shape."""

    def state_choice(self, options: Mapping[str, Any], facts: ParameterFacts) -> StateChoice:
        """In which format the state of a parameter is kept, and why."""
        state = str(options["state"])
        reason = "as torch keeps it" if state == "parameter" else f"state={state!r}"
        return StateChoice(PLAIN_FORMATS[state], reason)

    @abstractmethod
    def structure(self, options: Mapping[str, Any]) -> Hashable:
        """What decides which operators the rule consists of; when it changes, the update is built anew."""

    @abstractmethod
    def numbers(self, options: Mapping[str, Any], *, step: float, first: bool) -> dict[str, float]:
        """The numbers of a group that enter the graph, ``step`` counting from 1."""

    @abstractmethod
    def rule(self, emit: Emit, update: ParameterUpdate, structure: Any) -> UpdateResult:
        """Write the update of one parameter, operator for operator as ``torch.optim`` computes it."""

    def block_rule(self, emit: Emit, update: ParameterUpdate, structure: Any) -> UpdateResult:
        """Write the update of one parameter whose state is kept by blocks; optimizers without such state have none."""
        raise UnsupportedError(f"{type(self).__name__} keeps no state by blocks")


_NOT_OPTIONS = frozenset(
    {
        "groups",
        "maximize",
        "amsgrad",
        "block",
        "map",
        "stochastic_state",
        "min_8bit_size",
        "embeddings",
        "paged",
        "page_limit",
        "page_dir",
    }
)


def refuse_complex(optimizer: Optimizer, name: str, parameter: torch.Tensor) -> None:
    """Raise UnsupportedError for a complex parameter where torch treats it as a pair of reals (squares, signs)."""
    if parameter.is_complex() and not optimizer.takes_complex:
        raise UnsupportedError(
            f"parameter {name!r} is complex; torch treats complex parameters as pairs of reals in "
            f"{type(optimizer).__name__}, which is not supported: use SGD"
        )


def checked_page_limit(limit: int | str) -> int:
    """``page_limit`` in bytes; UnsupportedError for what is no number of bytes."""
    if limit == 0 and not isinstance(limit, bool):
        return 0
    return parse_bytes(limit, name="page_limit")


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless ``low <= value < high``."""
    if not low <= float(value) < high:
        raise ValueError(f"{name} must be in [{low}, {high}), came {value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless there are two numbers in [0, 1)."""
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        check_range(name, beta, 0.0, 1.0)
