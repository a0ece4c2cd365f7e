"""What differs between two dumps, pass by pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from graphopt.errors import DataError
from graphopt.ir.text_diff import text_diff

_STAGE_FILE = re.compile(r"\d+-(?P<stage>.+)\.(txt|py)")
_FIRST_FILE = "00-*.txt"
# A difference longer than this is cut: its beginning says what happened, the files say the rest.
_MAX_DIFF_LINES = 40


@dataclass(frozen=True)
class StageDifference:
    """A stage that differs: its files (None where a dump has none) and the cut difference of their texts."""

    stage: str
    file_a: str | None
    file_b: str | None
    num_changed_lines: int
    diff: str

    def __str__(self) -> str:
        if self.file_b is None:
            return f"{self.stage}: only in the first dump ({self.file_a})"
        if self.file_a is None:
            return f"{self.stage}: only in the second dump ({self.file_b})"
        return f"{self.stage}: {self.num_changed_lines} lines differ ({self.file_a}, {self.file_b})\n{self.diff}"


@dataclass(frozen=True)
class DumpComparison:
    """The differences of two dumps in the order of the first; none when all stages read the same."""

    dump_a: str
    dump_b: str
    differences: tuple[StageDifference, ...]

    @property
    def first(self) -> StageDifference | None:
        """The first stage that differs."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        if self.first is None:
            return f"no difference between {self.dump_a} and {self.dump_b}"
        files = self.first.file_a or self.first.file_b
        head = f"{self.dump_a} and {self.dump_b} differ in {len(self.differences)} files, first in {files}"
        return "\n\n".join([head, *map(str, self.differences)])


def compare_dumps(dir_a: str | Path, dir_b: str | Path) -> tuple[DumpComparison, ...]:
    """One DumpComparison for each pair of graphs; each argument is the folder of one graph or of several.

    Graphs are paired by folder name, stages by name and order, so that a pass that only one dump has shifts nothing.
    Raises DataError for a folder that holds no dump, and when two folders have no graph of the same name.
    """
    graphs_a, graphs_b = _graph_folders(Path(dir_a)), _graph_folders(Path(dir_b))
    if len(graphs_a) == len(graphs_b) == 1:
        return (_compare(next(iter(graphs_a.values())), next(iter(graphs_b.values()))),)
    shared = [name for name in graphs_a if name in graphs_b]
    if not shared:
        raise DataError(
            f"expected graphs of the same name in both folders, came {list(graphs_a)} and {list(graphs_b)}; "
            "name the folders of two graphs instead"
        )
    return tuple(_compare(graphs_a[name], graphs_b[name]) for name in shared)


def _graph_folders(directory: Path) -> dict[str, Path]:
    if not directory.is_dir():
        raise DataError(
            f"expected the folder of a dump, came {str(directory)!r}, which is no folder; see 'graphopt dump'"
        )
    if _is_dump(directory):
        return {directory.name: directory}
    found = {folder.name: folder for folder in sorted(directory.iterdir()) if folder.is_dir() and _is_dump(folder)}
    if not found:
        raise DataError(
            f"expected a dump, came {str(directory)!r}, where nothing holds a file {_FIRST_FILE}; "
            "write one with 'graphopt dump'"
        )
    return found


def _is_dump(folder: Path) -> bool:
    return any(folder.glob(_FIRST_FILE))


def _stages(folder: Path) -> list[tuple[str, Path]]:
    """Name and file of each stage, in order."""
    found = []
    for path in folder.iterdir():
        match = _STAGE_FILE.fullmatch(path.name)
        if match is not None:
            found.append((int(path.name.partition("-")[0]), match["stage"], path))
    return [(stage, path) for _, stage, path in sorted(found)]


def _compare(folder_a: Path, folder_b: Path) -> DumpComparison:
    stages_a, stages_b = _stages(folder_a), _stages(folder_b)
    matcher = SequenceMatcher(None, [name for name, _ in stages_a], [name for name, _ in stages_b], autojunk=False)
    differences: list[StageDifference] = []
    for tag, start_a, end_a, start_b, end_b in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(stages_a[start_a:end_a], stages_b[start_b:end_b], strict=True)
            differences += [found for (name, a), (_, b) in pairs for found in _differences(name, a, b)]
            continue
        differences += [StageDifference(name, path.name, None, 0, "") for name, path in stages_a[start_a:end_a]]
        differences += [StageDifference(name, None, path.name, 0, "") for name, path in stages_b[start_b:end_b]]
    return DumpComparison(str(folder_a), str(folder_b), tuple(differences))


def _differences(stage: str, file_a: Path, file_b: Path) -> Iterator[StageDifference]:
    before, after = file_a.read_text(encoding="utf-8"), file_b.read_text(encoding="utf-8")
    if before == after:
        return
    lines = text_diff(before, after, str(file_a), str(file_b), context=1).splitlines()
    num_changed = sum(line[:1] in ("+", "-") and line[:3] not in ("+++", "---") for line in lines)
    shown = lines[:_MAX_DIFF_LINES]
    if len(lines) > len(shown):
        shown.append(f"... {len(lines) - len(shown)} more lines")
    yield StageDifference(stage, file_a.name, file_b.name, num_changed, "\n".join(shown))
