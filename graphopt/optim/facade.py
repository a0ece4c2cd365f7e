"""The ``torch.optim.Optimizer`` that schedulers and loggers see; the compiled step reads it and keeps state in it."""

from __future__ import annotations

import copy
import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from graphopt.errors import StateError, UnsupportedError
from graphopt.optim.base import Optimizer
from graphopt.optim.kept_state import UPDATED, KeptState, copied_state
from graphopt.optim.saved_state import PARAMETER_NAMES, OwnGroup, SavedState, match_saved

RECORD = "graphopt"
"""The entry of a state dict, beside torch's own, that says what 8-bit codes mean."""
RECORD_VERSION = 1


class Keeper(Protocol):
    """What a facade needs from the step: its parameters by name, how their state is kept, the number of updates."""

    known: dict[str, torch.nn.Parameter]
    updates: int

    def kept(self, name: str, options: Mapping[str, Any], /) -> KeptState: ...
    def check(
        self, name: str, options: Mapping[str, Any], values: Mapping[str, Any], record: Mapping[str, Any] | None, /
    ) -> KeptState: ...
    def settle(self, name: str, options: Mapping[str, Any], kept: KeptState, /) -> None: ...


class OptimizerFacade(torch.optim.Optimizer):
    """Parameter groups and state of a compiled step, in torch's own form.

    ``param_groups`` may be changed at any time. ``state_dict`` has torch's form, with parameter names and, where state
    is in 8 bits, what its codes mean; ``load_state_dict`` keeps every dtype. ``step()`` does nothing but say so: the
    update is part of the compiled step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        keeper: Keeper,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """``aliases``: other names of tied parameters, by which a group may name them too."""
        self.definition = optimizer
        self.keeper = keeper
        self.after_replacing: Callable[[Mapping[Any, dict[str, Any]]], None] | None = None
        super().__init__(_make_groups(optimizer, parameters, aliases or {}), optimizer.options())
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

    def own_groups(self) -> tuple[OwnGroup, ...]:
        """The parameters of each group by name; StateError for one that the model does not have."""
        names = {id(parameter): name for name, parameter in self.keeper.known.items()}
        if any(id(parameter) not in names for group in self.param_groups for parameter in group["params"]):
            raise StateError("step.optimizer has a parameter that is not in the model: take it out of its group")
        return tuple(
            OwnGroup({names[id(parameter)]: parameter for parameter in group["params"]}) for group in self.param_groups
        )

    def formats(self) -> dict[str, dict[str, Any]]:
        """By parameter name, what the codes of state by blocks mean; only of parameters that have state."""
        found = {}
        for group, own in zip(self.param_groups, self.own_groups(), strict=True):
            for name, parameter in own.parameters.items():
                values = self.state.get(parameter)
                record = self.keeper.kept(name, group).record(values) if values else None
                if record is not None:
                    found[name] = record
        return found

    def state_dict(self) -> dict[str, Any]:
        """Torch's form; the groups have ``param_names``, and ``"graphopt"`` says what torch's form cannot.

        Tensors are the live ones.
        """
        saved = super().state_dict()
        for group, own in zip(saved["param_groups"], self.own_groups(), strict=True):
            group[PARAMETER_NAMES] = list(own.parameters)
        saved[RECORD] = {
            "version": RECORD_VERSION,
            "optimizer": type(self.definition).__name__,
            "updates": self.keeper.updates,
            "formats": self.formats(),
        }
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave, or what a ``torch.optim`` optimizer of the same kind saved.

        Every tensor keeps its dtype, unlike in torch, which casts state to the parameter's. Parameters are matched by
        name where the dict has names, else by position. All is checked before anything changes; StateError says what
        does not fit and what to do.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, dict(state_dict))
            state_dict = state_dict if replaced is None else replaced
        self._load(match_saved(state_dict, self.own_groups()), self._record_of(state_dict))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _record_of(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        record = saved.get(RECORD, {})
        if record and record.get("version") != RECORD_VERSION:
            raise StateError(
                f"the state has format version {record.get('version')}, this graphopt reads {RECORD_VERSION}"
            )
        if record:
            check_optimizer(record.get("optimizer"), self.definition)
        return record  # type: ignore[no-any-return]

    def _load(self, matched: SavedState, record: Mapping[str, Any]) -> None:
        if matched.options is None:
            raise StateError(
                "the saved parameter groups are divided in another way than those of the step: compile with the groups "
                "that the state was saved with, or take only its state: "
                "graphopt.optim.import_state(step, saved, options=False)"
            )
        known, formats = self.keeper.known, record.get("formats", {})
        groups = [{**own, **options} for own, options in zip(self.param_groups, matched.options, strict=True)]
        group_of = {name: position for position, own in enumerate(self.own_groups()) for name in own.parameters}
        state = {name: _as_kept(values) for name, values in matched.state.items()}
        kept = {
            name: self.keeper.check(name, groups[group_of[name]], values, formats.get(name))
            for name, values in state.items()
            if values
        }
        for name, found in kept.items():
            self.keeper.settle(name, groups[group_of[name]], found)
        loaded = {known[name]: copied_state(values, known[name]) for name, values in state.items()}
        self.replace_state(loaded, groups)
        self.keeper.updates = int(record.get("updates", self.keeper.updates))

    def replace_state(
        self, state: Mapping[torch.nn.Parameter, dict[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take ``state`` for all there is, and the options of ``groups`` for those of the groups, in order."""
        self.state = defaultdict(dict)
        for parameter, values in state.items():
            self.state[parameter] = values
        for own, options in zip(self.param_groups, groups, strict=True):
            own.update({key: _restored(value) for key, value in options.items() if key != "params"})
        if self.after_replacing is not None:
            self.after_replacing(self.state)

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


def check_optimizer(saved: Any, optimizer: Optimizer) -> None:
    """Raise StateError unless state that ``saved`` (the name of a class) left is of the kind of ``optimizer``."""
    if saved != type(optimizer).__name__:
        raise StateError(
            f"the state belongs to {saved}, but the step was compiled with {type(optimizer).__name__}: compile with "
            f"{saved}, or carry it over with graphopt.optim.import_state(step, saved_step.optimizer.state_dict())"
        )


def _as_kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter without what torch keeps as None; a momentum buffer of torch's SGD has been updated."""
    found = {key: value for key, value in values.items() if value is not None}
    return {**found, UPDATED: True} if "momentum_buffer" in found else found


def _restored(value: Any) -> Any:
    """A copy of an option; JSON and some savers make lists of tuples."""
    return tuple(value) if isinstance(value, list) else copy.deepcopy(value)


def _make_groups(
    optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter], aliases: Mapping[str, str]
) -> list[dict[str, Any]]:
    owner: dict[str, int] = {}
    every_name = {**{name: name for name in parameters}, **aliases}
    by_any_name = {name: parameters[canonical] for name, canonical in every_name.items()}
    for position, group in enumerate(optimizer.groups):
        for name in dict.fromkeys(every_name[member] for member in _members(group, by_any_name)):
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
