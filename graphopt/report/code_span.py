"""Text from a graph as a Markdown code span, in which nothing is read as markup."""

from __future__ import annotations

import re


def code(text: str) -> str:
    """``text`` as a code span in a table cell: its fence is longer than any run of backticks inside."""
    line = " ".join(text.split()).replace("|", r"\|")
    if not line:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    padding = " " if "`" in line else ""
    return f"{fence}{padding}{line}{padding}{fence}"
