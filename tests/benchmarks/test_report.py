"""The generated pages: from rows to the README's table, and whether it is out of date."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.drift import COMPANDED, DYNAMIC, FLOAT32, DriftFigures
from benchmarks.facts_llama import FactsFigures
from benchmarks.fp8_peers_table import PeerFigures
from benchmarks.fp8_training_table import Fp8TrainingFigures
from benchmarks.frontier_rows import AT_PEAK, FrontierFigures
from benchmarks.machine import Machine
from benchmarks.memory_peers import GRADIENT_CHECKPOINTING
from benchmarks.report import BEGIN, END, fp8_training_section, main, readme_section, results_page, with_section
from benchmarks.rows import CompileTimeFigures, MemoryFigures, Row, SpeedFigures, Subject, store_rows
from benchmarks.update_contenders import OWN_OPERATOR
from benchmarks.update_table import UpdateFigures
from benchmarks.whole_step_table import WholeStepFigures
from graphopt.errors import DataError

MIB = 2**20
MACHINE = Machine("a CPU", 2, 2, "2.13", "5.24", "3.12", "Linux 6", "0.1", "0123456789abcdef", False, "2025-12-01")

app = typer.Typer(add_completion=False)
app.command()(main)
runner = CliRunner()


def memory_rows(model: str, *, note: str = "") -> list[Row[MemoryFigures]]:
    """Peers and one pass, in round numbers."""

    def peer(name: str, mebibytes: int, seconds: float) -> MemoryFigures:
        return MemoryFigures(
            "peer",
            name,
            measured_peak_bytes=mebibytes * MIB,
            resting_bytes=10 * MIB,
            step_seconds=seconds,
            eager_seconds=2.0,
        )

    compiled = MemoryFigures("peer", "torch.compile", note=note) if note else peer("torch.compile", 300, 1.5)
    after = MemoryFigures("pass", "no pass", position=0, stage="", estimated_peak_bytes=MIB, measured_peak_bytes=MIB)
    figures = [peer("eager", 400, 2.0), compiled, peer("graphopt", 100, 3.0), after]
    return [Row(Subject(model, 124_000_000, "x f32[2]", ("loss",)), MACHINE, found) for found in figures]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two models, and a README with markers beside them."""
    for model in ("llama-25m", "gpt2-124m"):
        list(store_rows(tmp_path / f"memory-{model}.jsonl", memory_rows(model)))
    subject = memory_rows("gpt2-124m")[0].subject
    speed = SpeedFigures((2.0, 4.0), (1.0, 3.0), 9.0)
    list(store_rows(tmp_path / "speed-gpt2-124m.jsonl", [Row(subject, MACHINE, speed)]))
    times = [CompileTimeFigures(layers, 10, *([seconds] * 5)) for layers, seconds in ((12, 1.0), (24, 3.0))]
    list(store_rows(tmp_path / "compile-time-gpt2-124m.jsonl", [Row(subject, MACHINE, found) for found in times]))
    (tmp_path / "TOP.md").write_text(f"# graphopt\n\n{BEGIN}\n{END}\n\nmore\n")
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    """The command line for ``folder``."""
    return ["--readme", str(folder / "TOP.md"), "--results", str(folder), *more]


def test_row_of_a_model_shows_peers_and_ratios() -> None:
    section = readme_section([tuple(memory_rows("gpt2-124m"))])

    line = next(line for line in section.splitlines() if line.startswith("| gpt2-124m"))
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("gpt2-124m", "10.0 MiB", "400 MiB", "300 MiB", "100 MiB", "0.25"),
        *("2.00 s", "1.50 s", "3.00 s", "1.50"),
    ]
    assert "commit 0123456789." in section


def test_peer_that_failed_is_explained_below_the_table() -> None:
    section = readme_section([tuple(memory_rows("gpt2-124m", note="RuntimeError: no C++ compiler"))])

    assert "torch.compile on gpt2-124m: RuntimeError: no C++ compiler." in section


def test_writes_between_the_markers_and_is_then_up_to_date(folder: Path) -> None:
    stale = runner.invoke(app, arguments(folder, "--check"))
    written = runner.invoke(app, arguments(folder))
    fresh = runner.invoke(app, arguments(folder, "--check"))

    assert (stale.exit_code, written.exit_code, fresh.exit_code) == (1, 0, 0)
    readme = (folder / "TOP.md").read_text()
    assert readme.startswith(f"# graphopt\n\n{BEGIN}\n")
    assert readme.endswith(f"\n{END}\n\nmore\n")
    assert readme.index("| gpt2-124m") < readme.index("| llama-25m")


def test_check_sees_a_row_that_changed(folder: Path) -> None:
    runner.invoke(app, arguments(folder))
    list(store_rows(folder / "memory-llama-25m.jsonl", memory_rows("llama-25m", note="it fails now")))

    assert runner.invoke(app, arguments(folder, "--check")).exit_code == 1


def test_check_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir()), (folder / "TOP.md").read_text()

    runner.invoke(app, arguments(folder, "--check"))

    assert (sorted(folder.iterdir()), (folder / "TOP.md").read_text()) == before


def test_results_page_holds_every_suite(folder: Path) -> None:
    page = results_page(folder)

    assert "## gpt2-124m, pass by pass" in page
    assert "| 00 no pass" in page
    assert sum(line.startswith("|--") for line in page.splitlines()) == 4  # one rule a table, or it is no Markdown
    assert "0.625" in page  # the median of the ratios 0.5 and 0.75
    assert "1.50" in page  # three times the seconds for twice the layers


def test_frontier_has_a_summary_a_table_and_a_plot(folder: Path) -> None:
    eager = FrontierFigures("eager", peak_bytes=400 * MIB, own_seconds=(2.0,), eager_seconds=(2.0,))
    peer = replace(eager, name=GRADIENT_CHECKPOINTING, peak_bytes=200 * MIB, own_seconds=(3.0,))
    own = replace(
        peer,
        name="graphopt",
        backend="aten",
        setting=AT_PEAK,
        beside=peer.name,
        own_seconds=(2.4,),
        beside_seconds=(3.0,),
    )
    subject = memory_rows("gpt2-124m")[0].subject
    rows = [Row(subject, MACHINE, figures) for figures in (eager, peer, own)]
    list(store_rows(folder / "frontier-gpt2-124m.jsonl", rows))

    runner.invoke(app, arguments(folder))

    readme, page = (folder / "TOP.md").read_text(), (folder / "README.md").read_text()
    assert "| gradient checkpointing |" in readme and "0.80 (aten)" in readme and "1 of 1" in readme
    assert "## gpt2-124m, peak against time" in page and "(frontier-gpt2-124m.svg)" in page
    assert "| aten: step time at its peak |" in page
    assert (folder / "frontier-gpt2-124m.svg").read_text().startswith("<svg ")
    assert runner.invoke(app, arguments(folder, "--check")).exit_code == 0
    list(store_rows(folder / "frontier-gpt2-124m.jsonl", rows[:2]))
    assert runner.invoke(app, arguments(folder, "--check")).exit_code == 1


def test_results_page_has_the_anchors(folder: Path) -> None:
    figures = FactsFigures(8, "first 6", 24_940_000, 0.595, 24_000_000, 24_000_000, 5, 1, 4)
    subject = memory_rows("llama-d128")[0].subject
    list(store_rows(folder / "facts-llama-d128.jsonl", [Row(subject, MACHINE, figures)]))

    page = results_page(folder)

    line = next(line for line in page.splitlines() if "first 6" in line)
    assert "24.94 MB" in line and "59.5 %" in line and "25.0 %" in line and "yes" in line


def test_results_page_has_whole_steps_updates_and_drift(folder: Path) -> None:
    subject = memory_rows("gpt2-124m")[0].subject
    eager = WholeStepFigures("eager", resting_bytes=600, state_bytes=400, peak_bytes=400, seconds=(2.0,))
    own = replace(eager, name="graphopt", setting="EveryN(n=1)", embeddings="fp32", peak_bytes=100, seconds=(1.0,))
    runs = [
        DriftFigures(state, seed, 10, (2.0 + seed + gap + gap * seed,), 2.0, 1.0)
        for state, gap in ((FLOAT32, 0.0), (COMPANDED, 0.1), (DYNAMIC, 0.2))
        for seed in (0, 1)
    ]
    suites = {
        "whole-step-gpt2-124m": (eager, own),
        "update-1x8x8": (UpdateFigures(OWN_OPERATOR, 2.03, 1.0, (1.0,)),),
        "drift-byte-gpt-10": runs,
    }
    for name, figures in suites.items():
        list(store_rows(folder / f"{name}.jsonl", [Row(subject, MACHINE, found) for found in figures]))

    page = results_page(folder)

    assert "| EveryN(n=1), embeddings fp32: whole peak" in page and "| 0.70 |" in page.replace("   ", " ")
    assert "## The update alone" in page and "2.030" in page
    assert "after 10 steps" in page and "+0.1500" in page


def test_training_with_fp8_has_a_section_of_its_own(tmp_path: Path) -> None:
    assert fp8_training_section(tmp_path) == "Nothing has been measured yet."
    subject = Subject("byte-gpt-128x2", 400_000, "ids i64[8,64]", ("loss",))
    runs = [Fp8TrainingFigures(name, 0, 10, (loss,), 3, 4, 0, 1.0) for name, loss in (("bf16", 2.0), ("rowwise", 2.01))]
    list(store_rows(tmp_path / "fp8-training-x.jsonl", [Row(subject, MACHINE, run) for run in runs]))

    section = fp8_training_section(tmp_path)

    assert "byte-gpt-128x2, 0.4 M parameters" in section and "1.0050" in section and "a CPU" in section


@pytest.mark.parametrize("readme", ["# no markers", f"{BEGIN} only", f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_refuses_a_readme_without_both_markers_once(readme: str) -> None:
    with pytest.raises(DataError, match="benchmarks:begin"):
        with_section(readme, "table")


def test_refuses_rows_of_another_kind(folder: Path) -> None:
    (folder / "memory-vit-b16.jsonl").write_text('{"figures": {}}\n')

    with pytest.raises(DataError, match=r"vit-b16\.jsonl:1 is no row"):
        results_page(folder)


def test_the_readme_shows_fp8_beside_its_peers():
    subject = Subject("4 llama-block-512", 1, "2 x 512 positions", ("loss",))
    rows = tuple(
        Row(subject, MACHINE, PeerFigures(way, peak * MIB, block * MIB, 100 * MIB, 20 * MIB, 22.0, "0.q.weight"))
        for way, peak, block in (("eager", 100, 20), ("graphopt rowwise", 65, 11))
    )
    section = readme_section((), fp8=[rows])
    assert "forward and backward of 4 llama-block-512 in bf16, 2 x 512 positions" in section
    (line,) = [line for line in section.splitlines() if "graphopt rowwise" in line]
    assert [cell.strip() for cell in line.split("|")[2:6]] == ["65.0 MiB", "0.65", "11.0 MiB", "0.55"]
