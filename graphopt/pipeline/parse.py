"""Passes from text: ``name{option=value,...},name,...``; the inverse of how they print."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from graphopt.errors import PipelineError
from graphopt.pipeline.pass_base import Pass

_ITEM = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def parse_passes(text: str, registry: Mapping[str, type[Pass]] | None = None) -> tuple[Pass, ...]:
    """The passes that ``text`` names, from ``registry`` (default: the passes that ship with graphopt)."""
    known = builtin_passes() if registry is None else registry
    found = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            raise PipelineError(f"expected 'name' or 'name{{option=value}}' at {text[position:]!r}")
        found.append(_make(match.group(1), match.group(2) or "", known))
        position = match.end()
    return tuple(found)


def builtin_passes() -> Mapping[str, type[Pass]]:
    """The passes that ship with graphopt, by name."""
    passes: Mapping[str, type[Pass]] = importlib.import_module("graphopt.passes").BY_NAME
    return passes


def _make(name: str, options_text: str, registry: Mapping[str, type[Pass]]) -> Pass:
    if name not in registry:
        raise PipelineError(f"no pass is called {name!r}; there are {', '.join(sorted(registry))}")
    kind = registry[name]
    types = {field.name: _type_name(field.type) for field in fields(kind)}
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in options_text.split(","))):
        key, separator, value = part.partition("=")
        if not separator or key.strip() not in types:
            raise PipelineError(f"pass {name} has no option {part!r}; options are {sorted(types) or 'none'}")
        options[key.strip()] = _parse_value(name, key.strip(), value.strip(), types[key.strip()])
    return kind(**options)


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _parse_value(pass_name: str, option: str, text: str, type_name: str) -> Any:
    if text == "None" and "None" in type_name:
        return None
    if type_name.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise PipelineError(f"{pass_name}: {option} expects true or false, came {text!r}")
        return text.lower() == "true"
    for prefix, convert in (("int", int), ("float", float)):
        if type_name.startswith(prefix):
            try:
                return convert(text)
            except ValueError as error:
                if "str" in type_name:
                    return text
                raise PipelineError(f"{pass_name}: {option} expects {prefix}, came {text!r}") from error
    return text
