"""The README's tables, ``results/README.md``, tables of ``docs/fp8.md`` and ``docs/fp8-training.md``, and plots.

All are generated from the stored rows.

``python -m benchmarks.report [--check]``: ``--check`` writes nothing and exits 1 if any is out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from benchmarks.cells import bytes_cell, ratio_cell, seconds_cell
from benchmarks.checks_table import checks_table
from benchmarks.command import run_command
from benchmarks.compile_time import compile_time_table
from benchmarks.drift import DriftFigures, drift_checks, drift_table
from benchmarks.facts_llama import FactsFigures, facts_table
from benchmarks.fp8_fusion import Fp8FusionFigures, fp8_fusion_table
from benchmarks.fp8_peaks_table import PeakFigures, peaks_table
from benchmarks.fp8_peers_table import PeerFigures, peers_table
from benchmarks.fp8_saved_table import SavedFigures, saved_table
from benchmarks.fp8_training_table import Fp8TrainingFigures, training_checks, training_table
from benchmarks.frontier_plot import frontier_plot
from benchmarks.frontier_rows import FrontierFigures
from benchmarks.frontier_table import (
    SUMMARY_EXPLANATION,
    FrontierRows,
    acceptance_table,
    frontier_table,
    summary_table,
)
from benchmarks.linear_loss import linear_loss_table
from benchmarks.machine import REPOSITORY, Machine
from benchmarks.memory_table import memory_table
from benchmarks.models import MODELS
from benchmarks.peers import EAGER, GRAPHOPT, TORCH_COMPILE
from benchmarks.rows import (
    RESULTS,
    CompileTimeFigures,
    Figures,
    LinearLossFigures,
    MemoryFigures,
    Row,
    SpeedFigures,
    load_rows,
)
from benchmarks.speed import speed_table
from benchmarks.update_table import UpdateFigures, update_checks, update_table
from benchmarks.whole_step_table import WholeStepFigures, whole_step_checks, whole_step_table
from graphopt.errors import DataError
from graphopt.report.table import render

BEGIN = "<!-- benchmarks:begin -->"
END = "<!-- benchmarks:end -->"
README = REPOSITORY / "README.md"
# They belong to the rows of the repository: rows of another folder leave them alone.
FP8_PAGE = REPOSITORY / "docs" / "fp8.md"
FP8_TRAINING_PAGE = REPOSITORY / "docs" / "fp8-training.md"
_OUT_OF_DATE = 1
# Wider than any table: a line that wraps is no Markdown.
_WIDTH = 1000
_SHORT_COMMIT = 10

_EXPLANATION = """\
Peaks are what one training step (forward, backward, AdamW) needs above what rests between steps: parameters, buffers,
optimizer state, batch. Bytes are the allocator's own events; seconds are medians of interleaved rounds. Ratios are
graphopt over eager.\
"""

_WHOLE_STEP_EXPLANATION = """\
The whole training step of {model}, 2 x 512 tokens: parameters, optimizer state and everything else. Eager trains in
float32 with AdamW; the public recipes are bf16 autocast, checkpoints of every layer and AdamW8bit of torchao or
bitsandbytes; graphopt: bf16, checkpoints of every layer, AdamW8bit, the state of embeddings in float32 or 8 bits. Bytes
are the allocator's own events; seconds are medians of interleaved rounds.\
"""

_FP8_EXPLANATION = """\
FP8 beside torchao's: forward and backward of {model} in bf16, {batch}, blocks in FP8; the
peak above parameters and batch, and what one more block adds to it. torch.compile computes pointwise values again as it
sees fit, graphopt nothing that no checkpoint says. Decibels are those of the worst gradient, against float32. All of
them emulate FP8 on a CPU, so there is no time.\
"""

MemoryRows = tuple[Row[MemoryFigures], ...]
WholeStepRows = tuple[Row[WholeStepFigures], ...]
Fp8Rows = tuple[Row[PeerFigures], ...]


def readme_section(
    suites: Sequence[MemoryRows],
    frontiers: Sequence[FrontierRows] = (),
    whole_steps: Sequence[WholeStepRows] = (),
    fp8: Sequence[Fp8Rows] = (),
) -> str:
    """What stands between the markers: whole steps in low precision, FP8 beside its peers, the table of every model
    against its peers, then peak against time where it was measured, each with where and when."""
    if not suites and not frontiers and not whole_steps and not fp8:
        return "Nothing has been measured yet."
    parts: list[str] = []
    for rows in whole_steps:
        explanation = _WHOLE_STEP_EXPLANATION.format(model=rows[0].subject.model)
        parts += [explanation, _markdown(whole_step_table(rows)), _provenance([rows])]
    for blocks in fp8:
        subject = blocks[0].subject
        explanation = _FP8_EXPLANATION.format(model=subject.model, batch=subject.batch)
        parts += [explanation, _markdown(peers_table(blocks)), _provenance([blocks])]
    if suites:
        parts += [_EXPLANATION, _markdown(_peer_table(suites)), *_notes(suites), _provenance(suites)]
    if frontiers:
        summary = summary_table(frontiers)
        parts += [SUMMARY_EXPLANATION, _markdown(summary), _provenance(frontiers)]
    return "\n\n".join(parts)


def results_page(folder: Path) -> str:
    """``results/README.md``: each model pass by pass, speed, compile time."""
    parts = ["# Results", "Generated by `python -m benchmarks.report` from the rows in this folder."]
    for rows in load_all(folder, "memory", MemoryFigures):
        table = memory_table(rows, layout=box.MARKDOWN)
        table.title = None
        parts += [f"## {rows[0].subject.model}, pass by pass", _subject_line(rows), _markdown(table)]
    parts += _frontier_parts(load_all(folder, "frontier", FrontierFigures))
    for facts in load_all(folder, "facts", FactsFigures):
        table = facts_table([row.figures for row in facts])
        parts += ["## Anchors of a small Llama", _markdown(table), _provenance([facts])]
    speed = [row for rows in load_all(folder, "speed", SpeedFigures) for row in rows]
    if speed:
        parts += ["## Speed", _markdown(speed_table(speed)), _provenance([speed])]
    for found in load_all(folder, "compile-time", CompileTimeFigures):
        table = compile_time_table(found)
        table.title = None
        parts += [f"## Compile time of {found[0].subject.model}", _markdown(table), _provenance([found])]
    for losses in load_all(folder, "linear-loss", LinearLossFigures):
        heading = f"## Linear + cross-entropy, {losses[0].subject.model} (rows x features x classes)"
        parts += [heading, _markdown(linear_loss_table(losses)), _provenance([losses])]
    for fusion in load_all(folder, "fp8-fusion", Fp8FusionFigures):
        heading = f"## FP8 codes with their producer, {fusion[0].subject.model} (rows x columns)"
        parts += [heading, _markdown(fp8_fusion_table(fusion)), _provenance([fusion])]
    for kept in load_all(folder, "fp8-saved", SavedFigures):
        heading = f"## What a block of {kept[0].subject.model} keeps for its backward part, {kept[0].subject.batch}"
        parts += [heading, _markdown(saved_table(kept)), _provenance([kept])]
    parts += _whole_step_parts(folder) + _optimizer_parts(folder)
    return "\n\n".join(parts) + "\n"


def _frontier_parts(frontiers: Sequence[FrontierRows]) -> list[str]:
    parts: list[str] = []
    for rows in frontiers:
        model = rows[0].subject.model
        table = frontier_table(rows)
        table.title = None
        parts += [f"## {model}, peak against time", f"![{model}](frontier-{model}.svg)", _markdown(table)]
        parts += [_provenance([rows])]
    if frontiers:
        parts += ["## What the frontiers must show", _markdown(acceptance_table(frontiers))]
    return parts


def _whole_step_parts(folder: Path) -> list[str]:
    """Whole training steps in low precision with 8-bit optimizer state."""
    parts: list[str] = []
    suites = load_all(folder, "whole-step", WholeStepFigures)
    for rows in suites:
        heading = f"## Whole step of {rows[0].subject.model}, parameters and state included"
        parts += [heading, _markdown(whole_step_table(rows)), _provenance([rows])]
    if suites:
        found = ((rows[0].subject.model, whole_step_checks([row.figures for row in rows])) for rows in suites)
        parts += ["## What the whole steps must show", _markdown(checks_table(found))]
    return parts


def _optimizer_parts(folder: Path) -> list[str]:
    """Updates alone, and how far training drifts with small optimizer state."""
    parts: list[str] = []
    for updates in load_all(folder, "update", UpdateFigures):
        shape, figures = updates[0].subject.model, [row.figures for row in updates]
        parts += [f"## The update alone, {shape} (tensors x rows x columns, float32)", _markdown(update_table(updates))]
        parts += [_markdown(checks_table([(shape, update_checks(figures))])), _provenance([updates])]
    for runs in load_all(folder, "drift", DriftFigures):
        model, figures = runs[0].subject.model, [row.figures for row in runs]
        parts += [f"## Held-out loss of {model} after {figures[0].steps} steps", _markdown(drift_table(runs))]
        parts += [_markdown(checks_table([(model, drift_checks(figures))])), _provenance([runs])]
    return parts


def fp8_peaks_section(folder: Path) -> str:
    """What stands between the markers of ``docs/fp8.md``: peaks of a step beside bf16's."""
    parts: list[str] = []
    for rows in load_all(folder, "fp8-peaks", PeakFigures):
        parts += [_markdown(peaks_table(rows)), _provenance([rows])]
    return "\n\n".join(parts) if parts else "Nothing has been measured yet."


def fp8_training_section(folder: Path) -> str:
    """What stands between the markers of ``docs/fp8-training.md``: each recipe beside bf16, and its checks."""
    parts: list[str] = []
    for rows in load_all(folder, "fp8-training", Fp8TrainingFigures):
        subject, figures = rows[0].subject, [row.figures for row in rows]
        parts += [f"{subject.model}, {subject.num_parameters / 1e6:.1f} M parameters, batch {subject.batch}:"]
        parts += [_markdown(training_table(rows)), _markdown(checks_table([(subject.model, training_checks(figures))]))]
        parts += [_provenance([rows])]
    return "\n\n".join(parts) if parts else "Nothing has been measured yet."


def _plots(folder: Path, frontiers: Sequence[FrontierRows]) -> dict[Path, str]:
    """The plot of every model's frontier, by its file."""
    return {
        folder / f"frontier-{rows[0].subject.model}.svg": frontier_plot(
            rows[0].subject.model, [row.figures for row in rows]
        )
        for rows in frontiers
    }


def load_all(folder: Path, suite: str, kind: type[Figures]) -> list[tuple[Row[Figures], ...]]:
    """The rows of every file of ``suite`` in ``folder``, in the order of the models."""
    found = [rows for path in sorted(folder.glob(f"{suite}-*.jsonl")) if (rows := load_rows(path, kind))]
    return sorted(found, key=lambda rows: _model_position(rows[0].subject.model))


def with_section(readme: str, section: str) -> str:
    """A page with ``section`` between its markers; DataError if it does not have each once, in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in (before + after):
        raise DataError(f"a page must hold the lines {BEGIN} and {END} once each: add them where the table belongs")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def _peer_table(suites: Sequence[MemoryRows]) -> Table:
    table = Table("model")
    for heading in (
        "at rest",
        "eager peak",
        "torch.compile peak",
        "graphopt peak",
        "ratio",
        "eager step",
        "torch.compile step",
        "graphopt step",
        "ratio",
    ):
        table.add_column(heading, justify="right")
    for rows in suites:
        table.add_row(*_peer_cells(rows))
    return table


def _peer_cells(rows: MemoryRows) -> tuple[str, ...]:
    peers = {row.figures.name: row.figures for row in rows if row.figures.kind == "peer"}
    missing = [name for name in (EAGER, GRAPHOPT) if name not in peers]
    if missing:
        raise DataError(
            f"the rows of {rows[0].subject.model} lack {', '.join(missing)}: run the memory benchmark again"
        )
    eager, compiled, own = peers[EAGER], peers.get(TORCH_COMPILE), peers[GRAPHOPT]
    return (
        rows[0].subject.model,
        bytes_cell(own.resting_bytes),
        bytes_cell(eager.measured_peak_bytes),
        bytes_cell(compiled.measured_peak_bytes) if compiled is not None else "",
        bytes_cell(own.measured_peak_bytes),
        ratio_cell(own.measured_peak_bytes, eager.measured_peak_bytes),
        seconds_cell(eager.step_seconds),
        seconds_cell(compiled.step_seconds) if compiled is not None else "",
        seconds_cell(own.step_seconds),
        ratio_cell(own.step_seconds, own.eager_seconds),
    )


def _notes(suites: Sequence[MemoryRows]) -> list[str]:
    """Why a cell is empty."""
    rows = (row for suite in suites for row in suite)
    return [f"{row.figures.name} on {row.subject.model}: {row.figures.note}." for row in rows if row.figures.note]


def _markdown(table: Table) -> str:
    table.box = box.MARKDOWN
    return render(table, width=_WIDTH).strip("\n")


def _subject_line(rows: MemoryRows) -> str:
    subject = rows[0].subject
    size = (
        f"{subject.num_parameters / 1e6:.1f} M parameters; batch {subject.batch}; outputs {', '.join(subject.outputs)}"
    )
    return f"{size}. {_provenance([rows])}"


def _provenance(suites: Sequence[Sequence[Row[Any]]]) -> str:
    """One sentence for each machine and commit the rows come from."""
    places = dict.fromkeys(_place(row.machine) for rows in suites for row in rows)
    return " ".join(f"Measured on {place}." for place in places)


def _place(machine: Machine) -> str:
    commit = "no commit" if machine.commit is None else f"commit {machine.commit[:_SHORT_COMMIT]}"
    changed = " with changes" if machine.dirty else ""
    gpu = "" if machine.gpu is None else f"{machine.gpu}, triton {machine.triton}, "
    return (
        f"{gpu}{machine.cpu}, {machine.num_threads} threads, {machine.os}, torch {machine.torch}, "
        f"Python {machine.python}, {machine.date}, {commit}{changed}"
    )


def _model_position(label: str) -> tuple[int, str]:
    names = list(MODELS)
    known = [i for i, name in enumerate(names) if label == name or label.startswith(f"{name}-layers")]
    return (known[0] if known else len(names), label)


def main(
    check: Annotated[bool, typer.Option(help="Write nothing; exit 1 if a page is out of date.")] = False,
    readme: Annotated[Path, typer.Option(help="The README that has the markers.")] = README,
    results: Annotated[Path, typer.Option(help="The folder with the rows.")] = RESULTS,
) -> None:
    """Generate the README's benchmark tables, results/README.md, those of docs/fp8.md and docs/fp8-training.md, and the
    plots of frontiers."""
    frontiers = load_all(results, "frontier", FrontierFigures)
    whole_steps = load_all(results, "whole-step", WholeStepFigures)
    fp8 = load_all(results, "fp8-peers", PeerFigures)
    section = readme_section(load_all(results, "memory", MemoryFigures), frontiers, whole_steps, fp8)
    pages = {readme: with_section(readme.read_text(), section), results / "README.md": results_page(results)}
    pages |= _plots(results, frontiers)
    if results.resolve() == RESULTS.resolve():
        for page, make in ((FP8_PAGE, fp8_peaks_section), (FP8_TRAINING_PAGE, fp8_training_section)):
            pages[page] = with_section(page.read_text(), make(results))
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        typer.echo(
            f"out of date: {', '.join(map(str, stale))}; run python -m benchmarks.report and commit the result",
            err=True,
        )
        raise typer.Exit(_OUT_OF_DATE)
    for path in stale:
        path.write_text(pages[path])
        typer.echo(f"written: {path}")


if __name__ == "__main__":
    run_command(main)
