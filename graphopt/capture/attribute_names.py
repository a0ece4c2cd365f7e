"""Module names that are no Python identifiers: FX writes them into code as they are, which then does not parse.

Private torch: ``torch.fx.graph._format_target`` (torch 2.11 to 2.14). It can go when FX quotes such names itself.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager

import torch.fx.graph


@contextmanager
def any_attribute_name() -> Iterator[None]:
    """Inside, generated code reaches attributes such as ``lambda`` through ``getattr``."""
    original = torch.fx.graph._format_target
    torch.fx.graph._format_target = _format_target
    try:
        yield
    finally:
        torch.fx.graph._format_target = original


def _format_target(base: str, target: str) -> str:
    for part in target.split("."):
        plain = part.isidentifier() and not keyword.iskeyword(part)
        base = f"{base}.{part}" if plain else f"getattr({base}, {part!r})"
    return base
