"""Rows of results: what was measured, where, and the figures, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from benchmarks.machine import REPOSITORY, Machine
from benchmarks.models import Batch, BenchmarkModel
from graphopt.errors import DataError
from graphopt.ir.spec import TensorSpec

RESULTS = REPOSITORY / "benchmarks" / "results"

Figures = TypeVar("Figures")


@dataclass(frozen=True)
class Subject:
    """What was measured: the model under its label, its batch as text, what was asked for."""

    model: str
    num_parameters: int
    batch: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class MemoryFigures:
    """One row of the memory suite.

    ``kind``: "peer" (eager, torch.compile, graphopt: whole training loops) or "pass" (all passes up to this one).
    Peaks are above ``resting_bytes``. ``eager_seconds`` was measured in the same rounds as ``step_seconds``. Figures
    that do not exist are None, and ``note`` says why.
    """

    kind: str
    name: str
    position: int | None = None
    stage: str | None = None
    changes: int | None = None
    num_ops: int | None = None
    estimated_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    resting_bytes: int | None = None
    saved_bytes: int | None = None
    first_step_seconds: float | None = None
    step_seconds: float | None = None
    eager_seconds: float | None = None
    rounds: int | None = None
    note: str = ""

    @property
    def estimate_error(self) -> float | None:
        """|estimated - measured| over measured."""
        if self.estimated_peak_bytes is None or not self.measured_peak_bytes:
            return None
        return abs(self.estimated_peak_bytes - self.measured_peak_bytes) / self.measured_peak_bytes


@dataclass(frozen=True)
class SpeedFigures:
    """Seconds of a step in interleaved rounds, round by round."""

    eager_seconds: tuple[float, ...]
    graphopt_seconds: tuple[float, ...]
    first_step_seconds: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """graphopt's seconds over eager's, round by round."""
        return tuple(own / eager for own, eager in zip(self.graphopt_seconds, self.eager_seconds, strict=True))


@dataclass(frozen=True)
class CompileTimeFigures:
    """Seconds of each part of compiling a model with ``layers`` layers, one of 1 layer having been compiled before."""

    layers: int
    num_ops: int
    capture_seconds: float
    differentiate_seconds: float
    pass_seconds: float
    update_seconds: float
    emit_seconds: float

    @property
    def total_seconds(self) -> float:
        """All parts together."""
        return (
            self.capture_seconds
            + self.differentiate_seconds
            + self.pass_seconds
            + self.update_seconds
            + self.emit_seconds
        )


@dataclass(frozen=True)
class LinearLossFigures:
    """One way to a loss and its gradients: the peak above its inputs, results included; seconds round by round.

    ``relative_error``: the largest of loss and gradients to the unfused form, over the largest value.
    """

    name: str
    peak_bytes: int
    seconds: tuple[float, ...]
    relative_error: float


@dataclass(frozen=True)
class Row(Generic[Figures]):
    """One stored line."""

    subject: Subject
    machine: Machine
    figures: Figures


def subject_of(model: BenchmarkModel, module: nn.Module, batch: Batch, *, layers: int | None) -> Subject:
    """The Subject of a run."""
    return Subject(
        model=model.label(layers),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        batch=", ".join(f"{name} {TensorSpec.of(tensor)}" for name, tensor in batch.items()),
        outputs=model.outputs,
    )


def store_rows(path: Path, rows: Iterable[Row[Figures]]) -> Iterator[Row[Figures]]:
    """The rows, each handed on once it is written; ``path`` is replaced when all are there, else left as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("w") as stream:
            for row in rows:
                stream.write(json.dumps(asdict(row)) + "\n")
                stream.flush()
                yield row
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_rows(path: Path, kind: type[Figures]) -> tuple[Row[Figures], ...]:
    """The rows of ``path``; DataError names the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            stored = json.loads(line)
            rows.append(
                Row(
                    _made(Subject, stored["subject"]), _made(Machine, stored["machine"]), _made(kind, stored["figures"])
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}:{number} is no row of {kind.__name__} ({error}); run the benchmark again"
            ) from error
    return tuple(rows)


def _made(kind: type[Any], stored: dict[str, Any]) -> Any:
    unknown = set(stored) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()})
