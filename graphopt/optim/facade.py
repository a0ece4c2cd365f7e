"""The ``torch.optim.Optimizer`` that schedulers and loggers see; the compiled step reads it and keeps state in it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import StateError, UnsupportedError
from graphopt.optim.base import Optimizer


class OptimizerFacade(torch.optim.Optimizer):
    """Parameter groups and state of a compiled step, in torch's own form.

    ``param_groups`` may be changed at any time; ``state_dict`` and ``load_state_dict`` are torch's. ``step()`` does
    nothing but say so: the update is part of the compiled step.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.definition = optimizer
        super().__init__(_make_groups(optimizer, parameters), optimizer.options())
        # Schedulers warn unless an update has happened; the compiled step says so after each of its updates.
        self._opt_called = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: the compiled step applies the update itself."""
        raise UnsupportedError(
            "the update is part of the compiled step: call step(**batch) alone, not optimizer.step()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients never leave the graph."""

    def group_of(self, parameter: torch.nn.Parameter) -> int:
        """The position of the group that holds ``parameter``; StateError when none does."""
        for position, group in enumerate(self.param_groups):
            if any(member is parameter for member in group["params"]):
                return position
        raise StateError("a trainable parameter belongs to no group of step.optimizer")

    def replace_parameter(self, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
        """Let ``new`` take the place and, if its shape is the same, the state of ``old``."""
        for group in self.param_groups:
            group["params"] = [new if member is old else member for member in group["params"]]
        state = self.state.pop(old, None)
        if state and all(
            not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == new.shape
            for value in state.values()
        ):
            self.state[new] = state


def _make_groups(optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
    owner: dict[str, int] = {}
    for position, group in enumerate(optimizer.groups):
        for name in _members(group, parameters):
            if name in owner:
                raise UnsupportedError(f"parameter {name!r} is in groups {owner[name]} and {position} at once")
            owner[name] = position
    groups: list[dict[str, Any]] = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [parameters[name] for name in parameters if owner.get(name) == position],
        }
        for position, group in enumerate(optimizer.groups)
    ]
    rest = [parameter for name, parameter in parameters.items() if name not in owner]
    return [*groups, {"params": rest}] if rest or not groups else groups


def _members(group: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    chosen = group["params"]
    if callable(chosen):
        return [name for name, parameter in parameters.items() if chosen(name, parameter)]
    entries: Sequence[Any] = [chosen] if isinstance(chosen, (str, torch.Tensor)) else list(chosen)
    found: dict[str, None] = {}
    for entry in entries:
        if isinstance(entry, str):
            matched = [name for name in parameters if fnmatch.fnmatchcase(name, entry)]
        else:
            matched = [name for name, parameter in parameters.items() if parameter is entry]
        if not matched:
            what = repr(entry) if isinstance(entry, str) else f"a tensor of shape {list(entry.shape)}"
            raise UnsupportedError(
                f"a group names {what}, which no parameter matches; there are {list(parameters)[:20]}"
            )
        found.update(dict.fromkeys(matched))
    return list(found)
