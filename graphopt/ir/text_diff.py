"""Unified differences between program texts."""

from __future__ import annotations

import difflib


def text_diff(before: str, after: str, before_name: str, after_name: str, *, context: int = 3) -> str:
    """The unified diff of two texts; empty when they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), before_name, after_name, lineterm="", n=context
    )
    return "\n".join(lines)
