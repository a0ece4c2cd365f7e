"""Module paths: numbers in them, which is how models name their layers, and patterns of them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def numbered_prefixes(module: str) -> list[str]:
    """The parts of a path that end in a number: ``a.0`` and ``a.0.b.1`` for ``a.0.b.1.c``."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def matching_pattern(module: str, patterns: Sequence[str]) -> str | None:
    """The first of ``patterns`` (as in ``fnmatch``) that names the module at a path or one that it lies in; all lie in
    the root, whose path is empty and which "*" names.
    """
    parts = module.split(".") if module else []
    paths = ["", *(".".join(parts[: length + 1]) for length in range(len(parts)))]
    return next((pattern for pattern in patterns if any(fnmatchcase(path, pattern) for path in paths)), None)
