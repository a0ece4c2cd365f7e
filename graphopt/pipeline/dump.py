"""Dumps: a folder for each compiled graph: its text after every stage and pass, the code that runs, the report.

Only text is written, never tensor data, and nothing of the run is touched: no random number, no value, no second trace.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from graphopt.errors import DataError
from graphopt.ir.program import Program
from graphopt.ir.text_diff import text_diff
from graphopt.ir.units import format_bytes, format_seconds
from graphopt.pipeline.pass_base import PassRecord
from graphopt.pipeline.pipeline import PassEvent

_MAX_NAME_LENGTH = 80


class ReportFiles(Protocol):
    """What a dump needs of a report."""

    def memory_markdown(self) -> str:
        """The text of ``memory.md``."""
        ...

    def to_html(self, path: str | Path) -> None:
        """Write ``report.html``."""
        ...


@dataclass(frozen=True)
class _Entry:
    """One line of the index: a stage, or a pass with its record."""

    file_stem: str
    name: str
    record: PassRecord | None = None


class Dump:
    """Writes the dump of one compiled graph after the other; ``observe`` is a Pipeline observer.

    A graph begins with ``start``, which gives it a folder of its own (``step-1``, ``step-2``, ...), never an existing
    one, whoever else dumps into the same directory. Then ``observe`` and ``mark`` in the order of the work, and
    ``finish``. A ``mark`` without ``start`` begins a graph that was not captured; one after ``finish`` begins a twin:
    another graph made from what came before the stage of that name.
    """

    def __init__(self, directory: str | os.PathLike[str], kind: str = "step") -> None:
        """Raises DataError, before anything is compiled, if nothing can be written into ``directory``."""
        self.directory = Path(directory)
        self.kind = _file_name(kind)
        self.folder: Path | None = None
        self._entries: list[_Entry] = []
        self._is_finished = False
        _check_writable(self.directory)

    def start(self, program: Program) -> Path:
        """The new folder of a graph, with ``program`` in it as captured."""
        self.folder = _new_folder(self.directory, self.kind)
        self._entries, self._is_finished = [], False
        self._add("captured", program.text())
        return self.folder

    def mark(self, name: str, program: Program) -> None:
        """Write the text of a stage that no pass made, such as ``joint`` or ``step``."""
        if self.folder is None:
            self.folder = _new_folder(self.directory, self.kind)
        elif self._is_finished:
            self._start_twin(self.folder, name)
        self._add(name, program.text())

    def attach(self, name: str, text: str) -> None:
        """Write a file beside the texts of the stages, such as what compiled regions hold."""
        self._write(name, text)

    def observe(self, event: PassEvent) -> None:
        """Write what a pass made, and the difference to what it was given."""
        before, after = event.before.text(), event.after.text()
        stem = self._add(event.record.name, after, event.record)
        self._write(f"{stem}.diff", text_diff(before, after, "before", event.record.name) + "\n" * (before != after))

    def finish(self, source: str, report: ReportFiles) -> Path:
        """Write the emitted code, the index, the memory table and the report; returns the folder."""
        stem = self._stem("emitted")
        self._write(f"{stem}.py", source)
        self._write("index.md", _index(self._started().name, self._entries, f"{stem}.py"))
        self._write("memory.md", report.memory_markdown())
        report.to_html(self._started() / "report.html")
        self._is_finished = True
        return self._started()

    def _start_twin(self, finished: Path, stage: str) -> None:
        """A new folder that shares what came before ``stage`` with the ``finished`` one."""
        self.folder = _new_folder(self.directory, self.kind)
        names = [entry.name for entry in self._entries]
        self._entries = self._entries[: names.index(stage)] if stage in names else self._entries
        self._is_finished = False
        for entry in self._entries:
            shutil.copyfile(finished / f"{entry.file_stem}.txt", self.folder / f"{entry.file_stem}.txt")
            if entry.record is not None:
                shutil.copyfile(finished / f"{entry.file_stem}.diff", self.folder / f"{entry.file_stem}.diff")

    def _add(self, name: str, text: str, record: PassRecord | None = None) -> str:
        stem = self._stem(name)
        self._write(f"{stem}.txt", text)
        self._entries.append(_Entry(stem, name, record))
        return stem

    def _stem(self, name: str) -> str:
        return f"{len(self._entries):02d}-{_file_name(name)}"

    def _write(self, name: str, text: str) -> None:
        # A lone surrogate in a name of the graph must not stop a compilation.
        (self._started() / name).write_text(text, encoding="utf-8", errors="backslashreplace")

    def _started(self) -> Path:
        if self.folder is None:
            raise RuntimeError("Dump.start must come before anything else is written")
        return self.folder


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(_cannot_write(directory, error.strerror or str(error))) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DataError(_cannot_write(directory, "Permission denied"))


def _new_folder(directory: Path, kind: str) -> Path:
    number = 1
    while True:
        folder = directory / f"{kind}-{number}"
        try:
            folder.mkdir()  # fails if it exists, so that two processes never get the same one
        except FileExistsError:
            number += 1
        except OSError as error:
            raise DataError(_cannot_write(directory, error.strerror or str(error))) from error
        else:
            return folder


def _cannot_write(directory: Path, reason: str) -> str:
    return (
        f"expected a folder that dumps can be written into, came {str(directory)!r} ({reason}); "
        "choose another folder for dump= (or GRAPHOPT_DUMP), or make this one writable"
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:_MAX_NAME_LENGTH] or "unnamed"


def _index(title: str, entries: list[_Entry], emitted: str) -> str:
    lines = [
        f"# {title}",
        "",
        f"Emitted code: [{emitted}]({emitted}). Memory: [memory.md](memory.md). Report: [report.html](report.html).",
        "",
        "| # | pass or stage | stage | changes | ops | peak | saved for backward | time | declined | files |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---|",
        *(_index_row(entry) for entry in entries),
    ]
    return "\n".join(lines) + "\n"


def _index_row(entry: _Entry) -> str:
    number, _, stem_name = entry.file_stem.partition("-")
    text_link = f"[text]({entry.file_stem}.txt)"
    record = entry.record
    if record is None:
        return f"| {number} | **{stem_name}** | | | | | | | | {text_link} |"
    cells = (
        number,
        stem_name,
        record.stage,
        str(record.changes),
        _change(str(record.ops_before), str(record.ops_after)),
        _change(format_bytes(record.peak_bytes_before), format_bytes(record.peak_bytes_after)),
        _change(format_bytes(record.saved_bytes_before), format_bytes(record.saved_bytes_after)),
        format_seconds(record.seconds),
        str(len(record.refusals) or ""),
        f"{text_link} [diff]({entry.file_stem}.diff)",
    )
    return f"| {' | '.join(cells)} |"


def _change(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"
