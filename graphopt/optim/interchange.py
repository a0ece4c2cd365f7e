"""Optimizer state to and from other optimizers: ``torch.optim`` both ways, bitsandbytes and other formats of ours in.

Inputs are dicts that the caller has loaded (``torch.load(path, weights_only=True)``); nothing here reads files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from graphopt.errors import StateError
from graphopt.ir.spec import TensorSpec
from graphopt.optim.adam import Adam
from graphopt.optim.base import Optimizer
from graphopt.optim.facade import RECORD, OptimizerFacade
from graphopt.optim.kept_state import MASTER, REMAINDER, STEP, UPDATED, KeptState, as_step
from graphopt.optim.saved_moments import CodedMoment, SavedMoments, encoded, read_moments
from graphopt.optim.saved_state import PARAMETER_NAMES, match_saved
from graphopt.optim.sgd import SGD
from graphopt.optim.state import scale_name

_NOT_TORCH = ("params", "state")
_SCHEDULE_OPTIONS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""What schedules of torch keep in groups."""


class HasOptimizer(Protocol):
    """A compiled step."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


def export_state(step: HasOptimizer) -> dict[str, Any]:
    """A state dict for ``torch.optim.SGD``, ``Adam`` or ``AdamW``: the kind that the step's optimizer is.

    Moments are float32 (float64 for such parameters) whatever they are kept in, decoded from 8 bits; parameters are
    numbered by group, as torch does, and named in ``param_names``. Tensors are copies. Lion, which torch does not have,
    comes in the same form. Master copies are weights, not state: see ``export_weights``.
    """
    facade = _facade_of(step)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for group, own in zip(facade.param_groups, facade.own_groups(), strict=True):
        numbers = range(first, first := first + len(own.parameters))
        for number, (name, parameter) in zip(numbers, own.parameters.items(), strict=True):
            values = facade.state.get(parameter)
            if values:
                state[number] = _exported(values, facade.keeper.kept(name, group), parameter)
        options = {key: value for key, value in group.items() if key not in _NOT_TORCH}
        defaults = _torch_defaults(facade.definition, options)
        groups.append({**defaults, **options, "params": list(numbers), PARAMETER_NAMES: list(own.parameters)})
    return {"state": state, "param_groups": groups}


def export_weights(step: HasOptimizer) -> dict[str, torch.Tensor]:
    """The weights as the update knows them, by parameter name: float32 where a parameter of 2 bytes an element has a
    master copy or 16 more bits, and the parameter itself, in its dtype, elsewhere. Tensors are copies.
    """
    facade = _facade_of(step)
    found = {}
    for name, parameter in facade.keeper.known.items():
        state = facade.state.get(parameter) or {}
        if MASTER in state:
            found[name] = state[MASTER].clone()
        elif REMAINDER in state:
            found[name] = torch.ops.graphopt.join_remainder.default(parameter.detach(), state[REMAINDER])
        else:
            found[name] = parameter.detach().clone()
    return found


def import_state(step: HasOptimizer, saved: Mapping[str, Any], *, options: bool = True) -> None:
    """Take over the state of another optimizer, converted to the formats in which ``step`` keeps its own.

    ``saved``: the state dict of ``torch.optim.SGD``, ``Adam`` or ``AdamW``, of an optimizer of bitsandbytes (8 bits or
    32), or of ``step.optimizer`` of a step that keeps its state in another format. Float32 stays exact where it is kept
    so; 8-bit codes of the same map and block are taken as they are. Parameters are matched by ``param_names`` where
    there are any, else by position. ``options``: whether lr, betas, decay and so on are taken over too.

    Master copies start anew from the parameters: load the weights first. Everything is checked before anything changes;
    StateError says what does not fit.
    """
    facade = _facade_of(step)
    keeper, owns = facade.keeper, facade.own_groups()
    matched = match_saved(saved, owns)
    groups = [dict(group) for group in facade.param_groups]
    if options:
        if matched.options is None:
            raise StateError(
                "the saved parameter groups are divided in another way than those of the step: compile with the same "
                "groups, or keep the step's own options with import_state(step, saved, options=False)"
            )
        for group, theirs in zip(groups, matched.options, strict=True):
            group.update(_taken_options(facade.definition, theirs))
    group_of = {name: group for group, own in zip(groups, owns, strict=True) for name in own.parameters}
    formats = saved.get(RECORD, {}).get("formats", {})
    read: dict[str, SavedMoments] = {}
    for name, values in matched.state.items():
        if values:
            names = facade.definition.state_names(group_of[name])
            read[name] = read_moments(name, values, formats.get(name), names, TensorSpec.of(keeper.known[name]))
            if facade.definition.counts_steps and read[name].step is None:
                raise StateError(f"the saved state of {name!r} has no step count, which {_name(facade)} needs")
    kept = {name: keeper.kept(name, group_of[name]) for name in read}
    state = {keeper.known[n]: _imported(read[n], kept[n], keeper.known[n], facade.definition) for n in read}
    for name, found in kept.items():
        keeper.settle(name, group_of[name], found)
    facade.replace_state(state, groups)


def _facade_of(step: HasOptimizer) -> OptimizerFacade:
    facade = getattr(step, "optimizer", None)
    if not isinstance(facade, OptimizerFacade):
        raise StateError(
            f"expected a compiled step, which graphopt.compile(..., optimizer=...) gives; came {type(step).__name__}"
        )
    return facade


def _name(facade: OptimizerFacade) -> str:
    return type(facade.definition).__name__


def _exported(values: Mapping[str, Any], kept: KeptState, parameter: torch.Tensor) -> dict[str, Any]:
    """The state of one parameter in torch's form."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    found: dict[str, Any] = {STEP: as_step(values[STEP])} if STEP in values else {}
    for key, value in values.items():
        if key in (STEP, UPDATED, MASTER, REMAINDER) or key.endswith(scale_name("")):
            continue
        if kept.block_format is not None and scale_name(key) in values:
            found[key] = CodedMoment(value, values[scale_name(key)], kept.block_format).decoded()
        else:
            found[key] = value.to(wide, copy=True)
    return found


def _imported(
    read: SavedMoments, kept: KeptState, parameter: torch.nn.Parameter, optimizer: Optimizer
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if optimizer.counts_steps and read.step is not None:
        state[STEP] = as_step(read.step)
    elif "momentum_buffer" in read.moments:
        state[UPDATED] = True
    if MASTER in kept.specs:
        state[MASTER] = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False).copy_(parameter.detach())
    if REMAINDER in kept.specs:
        state[REMAINDER] = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
    for key, moment in read.moments.items():
        state.update(encoded(moment, key, parameter, kept))
    return state


def _torch_defaults(optimizer: Optimizer, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that a group of the same optimizer of torch has; none for an optimizer that torch does not have."""
    kind: Any = None
    if isinstance(optimizer, Adam):
        kind = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
    elif isinstance(optimizer, SGD):
        kind = torch.optim.SGD
    if kind is None:
        return {}
    return dict(kind([torch.zeros(0)], lr=options["lr"]).defaults)


def _taken_options(optimizer: Optimizer, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a saved group that the step's optimizer has; StateError for those that change what it computes."""
    if theirs.get("amsgrad") or theirs.get("maximize"):
        raise StateError("the saved optimizer has amsgrad or maximize on, which has no counterpart here")
    decoupled = theirs.get("decoupled_weight_decay")
    decays = decoupled is not None and bool(theirs.get("weight_decay"))
    if decays and isinstance(optimizer, Adam) and bool(decoupled) is not optimizer.decoupled:
        kind = "AdamW" if decoupled else "Adam"
        raise StateError(
            f"the saved optimizer decays weights as {kind} does, but the step was compiled with "
            f"{type(optimizer).__name__}: compile with {kind} or its 8-bit form, or keep the step's own options with "
            "options=False"
        )
    names = set(optimizer.options()) - {"state"}
    found = {key: value for key, value in theirs.items() if key in names or key in _SCHEDULE_OPTIONS}
    if isinstance(optimizer, SGD) and "momentum" not in theirs and "betas" in theirs:
        found["momentum"] = theirs["betas"][0]  # where bitsandbytes keeps it
    try:
        optimizer.check_options({**optimizer.options(), **found})
    except ValueError as error:
        raise StateError(
            f"the options of the saved groups do not fit {type(optimizer).__name__} ({error}): keep the step's own "
            "with options=False"
        ) from error
    return found
