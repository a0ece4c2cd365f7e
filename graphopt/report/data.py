"""What a report says, as values; the text, the page and the Markdown are made from these and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from graphopt.execute.state_rows import StateRow
from graphopt.ir.decisions import DecisionTable
from graphopt.ir.fp8_table import Fp8Table
from graphopt.ir.precision_table import PrecisionTable
from graphopt.pipeline.pass_base import PassRecord


class MemoryClass(StrEnum):
    """What a piece of memory is for; each is a field of MemoryByClass."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    BATCH = "batch"
    OPTIMIZER_STATE = "optimizer_state"
    CONSTANTS = "constants"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    FP8_STATE = "fp8_state"

    @property
    def label(self) -> str:
        """The class as people read it: ``optimizer state``."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class MemoryByClass:
    """Bytes by class at the moment of the peak; together they are the peak plus the resident bytes.

    ``batch`` holds all that a call brings in, tangents included. ``gradients`` holds gradients and the window that
    accumulation adds them to; ``activations`` what the forward part leaves for the backward part; ``temporaries`` all
    else, with what the operator at the peak allocates inside itself; ``fp8_state`` histories of delayed scaling, and
    weights that were quantized for a window.
    """

    parameters: int
    buffers: int
    batch: int
    optimizer_state: int
    constants: int
    gradients: int
    activations: int
    temporaries: int
    fp8_state: int = 0

    @property
    def total(self) -> int:
        """The sum over all classes."""
        return sum(nbytes for _, nbytes in self.items())

    def items(self) -> tuple[tuple[MemoryClass, int], ...]:
        """Class and bytes, in a fixed order."""
        return tuple((MemoryClass(item.name), getattr(self, item.name)) for item in fields(self))


@dataclass(frozen=True)
class TimelinePoint:
    """``live_bytes``: what is held above the resident bytes while the operator at ``position`` runs."""

    position: int
    op: str
    live_bytes: int
    segment: str


@dataclass(frozen=True)
class AliveValue:
    """A value whose memory is held at the peak; ``memory_class`` as in MemoryByClass."""

    name: str
    spec: str
    nbytes: int
    origin: str
    memory_class: str


@dataclass(frozen=True)
class Report:
    """All that a compiled step says about itself. Bytes are ints; ``timeline`` has one point for each operator.

    ``predicted_peak_bytes`` and ``measured_peak_bytes`` are above ``resident_bytes``; ``largest`` leaves out what is
    resident. ``state`` lists how the optimizer state of each parameter is kept, and why; ``fp8`` which products run in
    FP8, and why; ``fp8_products`` by what they are computed. ``str(report)`` is the table as text.
    """

    records: tuple[PassRecord, ...]
    memory: MemoryByClass
    predicted_peak_bytes: int
    resident_bytes: int
    measured_peak_bytes: int | None
    timeline: tuple[TimelinePoint, ...]
    largest: tuple[AliveValue, ...]
    backend: str
    backend_reason: str
    notes: tuple[str, ...]
    title: str
    decisions: DecisionTable = field(default_factory=DecisionTable)
    state: tuple[StateRow, ...] = ()
    precision: PrecisionTable = field(default_factory=PrecisionTable)
    fp8: Fp8Table = field(default_factory=Fp8Table)
    fp8_products: tuple[str, ...] = ()

    @property
    def peak(self) -> TimelinePoint | None:
        """The first point with the most live bytes; None for a program without operators."""
        return max(self.timeline, key=lambda point: point.live_bytes, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, tuples, strings and numbers, ready for ``json.dumps``."""
        return asdict(self)

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page, which loads nothing from anywhere."""
        from graphopt.report.html import report_html

        # A lone surrogate in a name must not stop the page from being written.
        Path(path).write_text(report_html(self), encoding="utf-8", errors="backslashreplace")

    def memory_markdown(self) -> str:
        """The largest values alive at the peak, with their source lines, as Markdown."""
        from graphopt.report.markdown import memory_markdown

        return memory_markdown(self)

    def __str__(self) -> str:
        from graphopt.report.table import report_text

        return report_text(self)
