"""What a pass is: a frozen dataclass that rewrites a Program and says what it changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import ClassVar

from torch import fx

from graphopt.ir.liveness import Workspace
from graphopt.ir.program import Program, Stage


class Numerics(StrEnum):
    """What a pass may do to numbers.

    EXACT: bit-equal on every device. REASSOCIATES: the same mathematics, other rounding. LOSSY: precision changes.
    DEPLOY: for inference only; a training pipeline refuses it.
    """

    EXACT = "exact"
    REASSOCIATES = "reassociates"
    LOSSY = "lossy"
    DEPLOY = "deploy"


@dataclass(frozen=True)
class Refusal:
    """A rewrite that was declined, with a reason that a user understands."""

    node: str
    reason: str

    @classmethod
    def at(cls, node: fx.Node, reason: str) -> Refusal:
        """A refusal at ``node``."""
        return cls(node.name, reason)


@dataclass(frozen=True)
class Changes:
    """How many rewrites a pass made (0 exactly if the text is unchanged), and what it declined."""

    count: int
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """Base of all passes. Options are the dataclass fields of the subclass, so they print, compare and parse."""

    name: ClassVar[str]
    """Kebab-case; the same word in the file name, the dump and the log."""
    stage: ClassVar[Stage] = Stage.ANY
    """The stage of Program it accepts; ANY for every stage."""
    numerics: ClassVar[Numerics] = Numerics.EXACT
    tolerance: ClassVar[float | None] = None
    """The largest error that the numeric check allows, over the largest value; None for what is usual for ``numerics``.
    All errors together may be a quarter of it, as norms.
    """
    after: ClassVar[tuple[str, ...]] = ()
    """Names of passes that must not come later in the same pipeline."""
    in_place: ClassVar[bool] = False
    """Whether the result may hold in-place operators; only such passes follow such a pass."""

    @abstractmethod
    def apply(self, program: Program) -> Changes:
        """Rewrite ``program`` in place and say what changed. Must not change what its signature means."""

    def prepared(self, workspace: Workspace) -> Pass:
        """The pass as a pipeline runs it that knows what operators allocate inside themselves; most do not care."""
        return self

    def options(self) -> dict[str, object]:
        """Options that differ from their defaults, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if self._is_set(field.name)}

    def _is_set(self, name: str) -> bool:
        default = next(field.default for field in fields(self) if field.name == name)
        return bool(getattr(self, name) != default)

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options().items())
        return f"{self.name}{{{options}}}" if options else self.name


def until_stable(program: Program, sweep: Callable[[Program], Changes]) -> Changes:
    """The sum of the changes of ``sweep``, run until it changes nothing, and the refusals of its last run."""
    count = 0
    while True:
        changes = sweep(program)
        count += changes.count
        if not changes.count:
            return Changes(count, changes.refusals)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did, as the pipeline saw it. Bytes are estimated by the plan; ``seconds`` is wall time."""

    position: int
    name: str
    stage: str
    numerics: str
    changes: int
    seconds: float
    ops_before: int
    ops_after: int
    peak_bytes_before: int
    peak_bytes_after: int
    saved_bytes_before: int
    saved_bytes_after: int
    refusals: tuple[Refusal, ...] = ()
