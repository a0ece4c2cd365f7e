"""Whether what a file holds fits a model, found out before anything is written."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphopt.errors import DataError
from graphopt.train.shared_storage import Place, find_conflicts, place_of

log = logging.getLogger(__name__)

_NAMES_SHOWN = 20


def check_values(model: torch.nn.Module, values: Mapping[str, Any], *, strict: bool, path: str | Path) -> None:
    """Raise a DataError that lists everything in ``values``, read from ``path``, that does not fit ``model``.

    A name may be missing when another name of the same memory is there; unknown names are errors if ``strict``.
    """
    state = model.state_dict()
    targets = {name: value for name, value in state.items() if _is_tensor(value) and not _is_extra_state(name)}
    _check_has_memory(targets)
    unexpected = [name for name in values if name not in state]
    problems = [
        *_listing("missing in the file", _missing(state, values)),
        *_listing("different from the model", _mismatches(targets, values)),
        *(_listing("not in the model", unexpected) if strict else ()),
    ]
    if not problems:
        known = {name: values[name] for name in targets if name in values}
        conflicts = find_conflicts(targets, known)
        pairs = [f"{conflict.first} and {conflict.second}" for conflict in conflicts]
        problems = _listing("one tensor in the model but different in the file", pairs)
    if problems:
        raise DataError(
            f"{str(path)!r} does not fit the model, which is left unchanged: {'; '.join(problems)}. "
            "Load it into the model it was saved from, or change the model to match"
        )
    if unexpected:
        log.info("%s: ignoring %d names the model does not have: %s", path, len(unexpected), unexpected[:_NAMES_SHOWN])


def _check_has_memory(targets: Mapping[str, torch.Tensor]) -> None:
    empty = [name for name, target in targets.items() if target.is_meta]
    if empty:
        raise DataError(
            f"expected a model with memory to load into; {empty[0]!r} is on the meta device: "
            "call model.to_empty(device=...) and tie its weights first"
        )


def _missing(state: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Names of ``state`` whose memory would not be written by anything in ``values``."""
    written: dict[tuple[str, int], list[Place]] = defaultdict(list)
    for name, target in state.items():
        place = place_of(target) if name in values and _is_tensor(target) else None
        if place is not None:
            written[place.storage].append(place)
    return [name for name, target in state.items() if name not in values and not _is_written(target, written)]


def _is_written(target: Any, written: Mapping[tuple[str, int], list[Place]]) -> bool:
    place = place_of(target) if _is_tensor(target) else None
    return place is not None and any(other.covers(place) for other in written.get(place.storage, ()))


def _mismatches(targets: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> list[str]:
    found = []
    for name, target in targets.items():
        expected, came = _kind(target), _kind(values.get(name, target))
        if expected != came:
            found.append(f"{name} (expected {expected}, came {came})")
    return found


def _kind(value: Any) -> str:
    if not _is_tensor(value):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _listing(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"{title}: {', '.join(names[:_NAMES_SHOWN])}{more}"]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_extra_state(name: str) -> bool:
    """Whether the entry belongs to ``Module.set_extra_state``, which takes whatever it saved."""
    return name.rpartition(".")[2] == "_extra_state"
