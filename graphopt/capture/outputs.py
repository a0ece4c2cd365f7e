"""Names for everything a model returns, selection by name, and rebuilding the same structure from a step's tensors.

Names are paths: ``loss``, ``hidden_states.0``, ``1.hidden``. A single returned tensor is called ``0`` (or ``output``).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.capture.keyed import StepOutput, keyed_instance
from graphopt.errors import OutputError

SINGLE_OUTPUT_ALIAS = "output"


@dataclass(frozen=True)
class TensorLeaf:
    """The place of one tensor: its position among the requested tensors."""

    position: int


@dataclass(frozen=True)
class ConstantLeaf:
    """A value that is not a tensor and therefore fixed at capture."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A dict, dataclass, NamedTuple, list or tuple: its type and its named children (unrequested ones left out)."""

    kind: type
    children: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class OutputSelection:
    """Requested tensors by name, and the structure that a result is rebuilt into."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    structure: Container


def named_leaves(result: Any) -> tuple[tuple[str, Any], ...]:
    """Every leaf of a model's result with its path."""
    return tuple(_walk(result, ""))


def select_outputs(result: Any, requested: Sequence[str] | None) -> OutputSelection:
    """The tensors that ``requested`` names (None: all of them), in the order asked for.

    A name may stand for a container; then it means every tensor below it. Raises OutputError for a name that does not
    exist (listing what there is), that is None for this batch, or that is not a tensor.
    """
    leaves = _leaves_by_name(result)
    if requested is None:
        names = [name for name, value in leaves.items() if isinstance(value, torch.Tensor)]
    else:
        names = [leaf for name in requested for leaf in _resolve(name, leaves)]
    names = list(dict.fromkeys(names))
    positions = {name: position for position, name in enumerate(names)}
    structure = _structure(result, "", positions)
    if not isinstance(structure, Container):
        structure = Container(StepOutput, (("0", structure),))
    return OutputSelection(tuple(names), tuple(leaves[name] for name in names), structure)


def with_loss(selection: OutputSelection, name: str, loss: torch.Tensor) -> OutputSelection:
    """``selection`` with a loss that a user's function computed as ``name``, in place of one the model returned."""
    if name in selection.names:
        position = selection.names.index(name)
        tensors = (*selection.tensors[:position], loss, *selection.tensors[position + 1 :])
        return OutputSelection(selection.names, tensors, selection.structure)
    leaf = (name, TensorLeaf(len(selection.names)))
    children = (*selection.structure.children, leaf)
    return OutputSelection((*selection.names, name), (*selection.tensors, loss), Container(StepOutput, children))


def rebuild(structure: Any, tensors: Sequence[Any]) -> Any:
    """The result of a step: the user's own structure around ``tensors``, with attribute and key access at the top."""
    return keyed_instance(structure.kind, [(name, _rebuild(child, tensors)) for name, child in structure.children])


def _rebuild(structure: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(structure, TensorLeaf):
        return tensors[structure.position]
    if isinstance(structure, ConstantLeaf):
        return structure.value
    values = [(name, _rebuild(child, tensors)) for name, child in structure.children]
    kind = structure.kind
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        given = dict(values)
        return kind(*(given.get(field) for field in kind._fields))
    if issubclass(kind, (list, tuple)):
        return kind(value for _, value in values)
    return keyed_instance(kind, values)


def _leaves_by_name(result: Any) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in named_leaves(result):
        if name in leaves:
            raise OutputError(
                f"the model returns two outputs called {name!r} (a key that contains a dot reads like a path); "
                "rename one of them"
            )
        leaves[name] = value
    return leaves


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = _children(value)
    if children is None:
        yield path or "0", value
        return
    for name, child in children:
        yield from _walk(child, f"{path}.{name}" if path else name)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(field, getattr(value, field)) for field in value._fields]
    if isinstance(value, (list, tuple)):
        return [(str(position), child) for position, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _structure(value: Any, path: str, positions: Mapping[str, int]) -> Any:
    children = _children(value)
    if children is None:
        name = path or "0"
        if name in positions:
            return TensorLeaf(positions[name])
        return ConstantLeaf(None if isinstance(value, torch.Tensor) else value)
    kept = []
    for name, child in children:
        below = f"{path}.{name}" if path else name
        if _is_needed(child, below, positions):
            kept.append((name, _structure(child, below, positions)))
    return Container(type(value), tuple(kept))


def _is_needed(child: Any, path: str, positions: Mapping[str, int]) -> bool:
    """Requested tensors and plain constants stay; unrequested tensors and opaque objects (caches) go."""
    leaves = list(_walk(child, path))
    if any(name in positions for name, _ in leaves):
        return True
    return bool(leaves) and all(isinstance(leaf, (int, float, str, bool, type(None))) for _, leaf in leaves)


def _resolve(name: str, leaves: Mapping[str, Any]) -> list[str]:
    if name == SINGLE_OUTPUT_ALIAS and name not in leaves and set(leaves) == {"0"}:
        name = "0"
    found = [leaf for leaf in leaves if leaf == name or leaf.startswith(name + ".")]
    if not found:
        raise OutputError(_unknown(name, leaves))
    tensors = [leaf for leaf in found if isinstance(leaves[leaf], torch.Tensor)]
    if not tensors:
        value = leaves[found[0]]
        if value is None:
            raise OutputError(
                f"output {name!r} is missing: the model returned None for it with this batch "
                f"(a loss usually needs labels); {_available(leaves)}"
            )
        raise OutputError(f"output {name!r} is a {type(value).__name__}, not a tensor; {_available(leaves)}")
    return tensors


def _unknown(name: str, leaves: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, leaves, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"the model has no output {name!r}{hint} {_available(leaves)}"


def _available(leaves: Mapping[str, Any]) -> str:
    names = [name for name, value in leaves.items() if isinstance(value, torch.Tensor)]
    return f"it returns the tensors: {', '.join(names) or 'none'}"
