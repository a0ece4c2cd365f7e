"""Results with both attribute and key access, of the user's own type where it has named fields."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any


class StepOutput(dict[str, Any]):
    """A dict whose entries are attributes too; an integer key counts in order, as in a tuple."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {list(self)}") from None

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return super().__getitem__(str(key)) if str(key) in self else list(self.values())[key]
        return super().__getitem__(key)


def keyed_instance(kind: Any, values: Sequence[tuple[str, Any]]) -> Any:
    """An instance of ``kind`` (or a subclass that adds key access) with ``values``; other fields are None."""
    if issubclass(kind, StepOutput) or kind in (dict, tuple, list):
        return StepOutput(values)
    if issubclass(kind, Mapping):
        return _mapping(kind, values)
    given = dict(values)
    if issubclass(kind, tuple):
        return _keyed_type(kind)._make(given.get(field) for field in kind._fields)
    instance = object.__new__(_keyed_type(kind))
    for field in dataclasses.fields(kind):
        object.__setattr__(instance, field.name, given.get(field.name))
    return instance


def _mapping(kind: type, values: Sequence[tuple[str, Any]]) -> Any:
    if dataclasses.is_dataclass(kind):  # transformers' ModelOutput: an ordered dict that is a dataclass
        return kind(**dict(values))
    return StepOutput(values)


@functools.cache
def _keyed_type(kind: Any) -> Any:
    def get_item(self: Any, key: Any) -> Any:
        if isinstance(key, str):
            return getattr(self, key)
        return kind.__getitem__(self, key)

    def keys(self: Any) -> list[str]:
        return list(getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind)])

    body = {"__getitem__": get_item, "keys": keys, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if dataclasses.is_dataclass(kind) and "__slots__" in vars(kind):
        body["__slots__"] = ()
    return type(kind.__name__, (kind,), body)
