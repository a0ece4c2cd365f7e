"""A state dict in the form of ``torch.optim``: whose state is whose, found by name where there are names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import StateError

PARAMETER_NAMES = "param_names"
_NAMES_SHOWN = 8
_NOT_OPTIONS = ("params", PARAMETER_NAMES)


@dataclass(frozen=True)
class OwnGroup:
    """A parameter group of a step: its parameters by name, in order."""

    parameters: Mapping[str, torch.nn.Parameter]

    def ways(self) -> tuple[tuple[str, ...], ...]:
        """All of its names; and those of what is trained, which is often all that another optimizer was given."""
        trained = tuple(name for name, parameter in self.parameters.items() if parameter.requires_grad)
        return (tuple(self.parameters), trained)


@dataclass(frozen=True)
class SavedState:
    """What a state dict says about a step: state by parameter name, and the options of each group of the step.

    ``options`` is None where the saved groups are divided in another way than the step's.
    """

    state: Mapping[str, Mapping[str, Any]]
    options: tuple[Mapping[str, Any], ...] | None


def match_saved(saved: Any, groups: Sequence[OwnGroup]) -> SavedState:
    """The SavedState of a state dict for a step with ``groups``.

    By name where the saved groups have ``param_names``, whatever the order; else by position, as torch does. Raises
    StateError for what is no such state dict, and for parameters that do not match.
    """
    saved_groups = _groups_of(saved)
    named = [tuple(group[PARAMETER_NAMES]) for group in saved_groups if PARAMETER_NAMES in group]
    names: Sequence[tuple[str, ...]] = named
    partners: tuple[int, ...] | None
    if named and len(named) == len(saved_groups):
        partners = _partners_by_name(names, groups)
    else:
        names = _names_by_position(saved_groups, groups)
        partners = tuple(range(len(groups)))
    numbers = [number for group in saved_groups for number in group["params"]]
    flat = [name for group in names for name in group]
    if len(numbers) != len(flat):
        raise StateError(
            f"the saved groups have {len(numbers)} parameters and {len(flat)} names: one for each is needed"
        )
    name_of = dict(zip(numbers, flat, strict=True))
    stray = [number for number in saved["state"] if number not in name_of]
    if stray:
        raise StateError(f"the saved state has entries {stray[:_NAMES_SHOWN]}, which belong to none of its groups")
    state = {name_of[number]: values for number, values in saved["state"].items()}
    return SavedState(state, None if partners is None else tuple(_options(saved_groups[i]) for i in partners))


def _groups_of(saved: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(saved, Mapping) and {"groups", "window"} <= set(saved):
        raise StateError(
            "expected a state dict of an optimizer, came that of a whole step: load it with step.load_state_dict(...)"
        )
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        came = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise StateError(f"expected a state dict of an optimizer with 'state' and 'param_groups', came {came}")
    groups = saved["param_groups"]
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise StateError("expected param_groups as dicts with 'params', as torch.optim saves them")
    return groups  # type: ignore[no-any-return]


def _partners_by_name(names: Sequence[tuple[str, ...]], groups: Sequence[OwnGroup]) -> tuple[int, ...] | None:
    """For each group of the step the position of the saved group with the same parameters; None if one has none."""
    flat = [name for group in names for name in group]
    known = {name for group in groups for name in group.parameters}
    trained = {name for group in groups for name in group.ways()[1]}
    unknown, missing = sorted(set(flat) - known), sorted(trained - set(flat))
    if unknown or missing or len(flat) != len(set(flat)):
        raise StateError(
            f"the parameter names of the saved state do not match the model: unknown {unknown[:_NAMES_SHOWN]}, missing "
            f"{missing[:_NAMES_SHOWN]}; rename them, or take {PARAMETER_NAMES!r} out of its param_groups to match "
            "parameters by position"
        )
    partners = []
    for group in groups:
        ways = [set(way) for way in group.ways()]
        found = [position for position, inside in enumerate(names) if set(inside) in ways]
        if not found:
            return None
        partners.append(found[0])
    return tuple(partners) if len(set(partners)) == len(names) else None


def _names_by_position(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[OwnGroup]
) -> Sequence[tuple[str, ...]]:
    sizes = [len(group["params"]) for group in saved_groups]
    for ways in zip(*(group.ways() for group in groups), strict=True):
        if [len(way) for way in ways] == sizes:
            return list(ways)
    raise StateError(
        f"the saved groups have {sizes} parameters, those of the step {[len(group.parameters) for group in groups]}: "
        f"divide them alike, or add {PARAMETER_NAMES!r} to the saved groups (torch.optim does for named_parameters()) "
        "to match by name"
    )


def _options(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
