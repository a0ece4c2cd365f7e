"""Numbers in module paths: children of a list of modules, which is how models name their layers."""

from __future__ import annotations


def numbered_prefixes(module: str) -> list[str]:
    """The parts of a path that end in a number: ``a.0`` and ``a.0.b.1`` for ``a.0.b.1.c``."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]
