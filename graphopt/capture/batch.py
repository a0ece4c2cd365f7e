"""The batch as named tensors: positional and keyword inputs bound to the model's forward, nested ones by path."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphopt.errors import BatchError

_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class BoundBatch:
    """A batch after binding: tensors by name, everything else as fixed leaves of ``structure``.

    ``names``/``tensors``: tensor leaves in order; ``leaves``: all leaves, tensors replaced by None, which with
    ``structure`` give back (positional, keyword, loss-only) arguments.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    tensor_positions: tuple[int, ...]
    structure: Any

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Positional arguments, keyword arguments and loss-only entries, rebuilt around ``tensors``."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs, extra = pytree.tree_unflatten(leaves, self.structure)
        return tuple(args), kwargs, extra


class BatchBinder:
    """Binds calls to a model's forward. ``allow_extra``: unknown keywords are kept for the loss function."""

    def __init__(self, model: torch.nn.Module, *, allow_extra: bool) -> None:
        self.model = model
        self.signature = inspect.signature(model.forward)
        self.allow_extra = allow_extra
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        self.takes_any_keyword = inspect.Parameter.VAR_KEYWORD in kinds

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundBatch:
        """The BoundBatch of a call; BatchError says which argument does not fit and what forward accepts."""
        known, extra = self._split(kwargs)
        try:
            bound = self.signature.bind(*args, **known)
        except TypeError as error:
            raise BatchError(f"the batch does not fit the model's forward{self.signature}: {error}") from None
        leaves, structure = pytree.tree_flatten((bound.args, bound.kwargs, extra))
        names = self._leaf_names(bound, extra)
        if len(names) != len(leaves):
            names = [f"batch.{position}" for position in range(len(leaves))]
        for name, leaf in zip(names, leaves, strict=True):
            _refuse_unless_fixed(name, leaf)
        positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        tensor_names = tuple(self._apart_from_parameters(names[i]) for i in positions)
        _refuse_duplicates(tensor_names)
        return BoundBatch(
            names=tensor_names,
            tensors=tuple(leaves[i] for i in positions),
            leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            tensor_positions=positions,
            structure=structure,
        )

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.takes_any_keyword:
            return dict(kwargs), {}
        known = {name: value for name, value in kwargs.items() if name in self.signature.parameters}
        extra = {name: value for name, value in kwargs.items() if name not in known}
        if extra and not self.allow_extra:
            accepted = list(self.signature.parameters)
            raise BatchError(f"the model's forward takes no {', '.join(map(repr, extra))}; it accepts {accepted}")
        return known, extra

    def _apart_from_parameters(self, name: str) -> str:
        """``name``, or ``batch.name`` where a parameter or buffer is called so: each input has a name of its own."""
        for find in (self.model.get_parameter, self.model.get_buffer):
            try:
                find(name)
            except AttributeError:
                continue
            return f"batch.{name}"
        return name

    def _leaf_names(self, bound: inspect.BoundArguments, extra: Mapping[str, Any]) -> list[str]:
        parameters = list(self.signature.parameters.values())
        names: list[str] = []
        for position, value in enumerate(bound.args):
            parameter = parameters[min(position, len(parameters) - 1)]
            is_rest = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            index = position - parameters.index(parameter)
            names += _paths(f"{parameter.name}.{index}" if is_rest else parameter.name, value)
        for mapping in (bound.kwargs, extra):
            for name, value in mapping.items():
                names += _paths(name, value)
        return names


def _paths(prefix: str, value: Any) -> list[str]:
    with_paths, _ = pytree.tree_flatten_with_path(value)
    return [prefix + "".join(f".{_key_text(key)}" for key in path) for path, _ in with_paths]


def _refuse_unless_fixed(name: str, leaf: Any) -> None:
    """Raise BatchError for a leaf that could change without its graph being compiled anew."""
    if isinstance(leaf, torch.Tensor) or _is_fixed(leaf):
        return
    way_out = "pass its tensors"
    if dataclasses.is_dataclass(leaf):
        way_out += ", or register the class with torch.utils._pytree.register_dataclass"
    raise BatchError(f"pass tensors: found {type(leaf).__module__}.{type(leaf).__qualname__} at {name!r}; {way_out}")


def _is_fixed(leaf: Any) -> bool:
    if type(leaf) in _FIXED or isinstance(leaf, enum.Enum):
        return True
    if isinstance(leaf, slice):
        return all(map(_is_fixed, (leaf.start, leaf.stop, leaf.step)))
    return type(leaf) in (tuple, frozenset) and all(map(_is_fixed, leaf))


def _refuse_duplicates(names: Sequence[str]) -> None:
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise BatchError(
            f"several batch tensors are called {', '.join(map(repr, doubled))}: rename keys so that each path is unique"
        )


def _key_text(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
