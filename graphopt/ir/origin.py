"""Where a node came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a node came from: module path, the user's source line, and whether it is part of the gradient."""

    module: str = ""
    source: str = ""
    code: str = ""
    is_gradient: bool = False

    @property
    def place(self) -> tuple[str, str, str]:
        """Where in the model: the same for an operator and for its gradient."""
        return self.module, self.source, self.code

    def __str__(self) -> str:
        where = [part for part in (self.module, self.source, self.code) if part]
        return ("grad of " if self.is_gradient and where else "") + " | ".join(where)


NO_ORIGIN = Origin()
