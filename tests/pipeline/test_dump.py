"""Dumps: own folders, files that parse, sizes that do not grow, nothing of the run changed."""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import GraphoptError
from graphopt.execute.emit import emit_source
from graphopt.ir.origin import Origin
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import Signature
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.pipeline.dump import Dump
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import program_of
from tests.support.steps import step_executable, two_layers


class PlainReport:
    """A report as a dump sees it."""

    def memory_markdown(self) -> str:
        return "# memory\n"

    def to_html(self, path: str | Path) -> None:
        Path(path).write_text("<html></html>")


def small_program() -> Program:
    program = program_of(lambda x: (x.exp() + x.exp(), x.cos()), torch.randn(3))
    program.stage = Stage.JOINT
    return program


def write_dump(directory: Path, *, kind: str = "step") -> Path:
    program = small_program()
    dump = Dump(directory, kind)
    dump.start(program)
    after = Pipeline((DropDead(), Dedupe())).run(program, observer=dump.observe)
    dump.mark("joint", after)
    Pipeline((DropDead(),)).run(after, observer=dump.observe)
    return dump.finish("x = 1\n", PlainReport())


def assert_parses(folder: Path) -> None:
    for file in [*folder.glob("*.txt"), *folder.glob("*.py")]:
        ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def test_numbers_stages_and_passes_in_one_sequence(tmp_path: Path):
    folder = write_dump(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "00-captured.txt",
        "01-drop-dead.diff",
        "01-drop-dead.txt",
        "02-dedupe.diff",
        "02-dedupe.txt",
        "03-joint.txt",
        "04-drop-dead.diff",
        "04-drop-dead.txt",
        "05-emitted.py",
        "index.md",
        "memory.md",
        "report.html",
    ]


def test_diffs_hold_what_a_pass_changed(tmp_path: Path):
    folder = write_dump(tmp_path)
    assert (folder / "01-drop-dead.diff").read_text() == ""
    assert "-    exp_1: 'f32[3]' = aten.exp.default(" in (folder / "02-dedupe.diff").read_text()


def test_index_links_every_file(tmp_path: Path):
    folder = write_dump(tmp_path)
    index = (folder / "index.md").read_text()
    unlinked = [path.name for path in folder.iterdir() if f"({path.name})" not in index and path.name != "index.md"]
    assert unlinked == []
    assert "| 02 | dedupe | joint | 1 | 4 → 3 |" in index


def test_never_reuses_a_folder(tmp_path: Path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "precious.txt").write_text("mine")
    names = [write_dump(tmp_path).name, write_dump(tmp_path).name, write_dump(tmp_path, kind="eval").name]
    assert names == ["step-2", "step-3", "eval-1"]
    assert [path.name for path in (tmp_path / "step-1").iterdir()] == ["precious.txt"]


def test_a_second_graph_from_the_same_joint_program_is_a_twin(tmp_path: Path):
    program, dump = small_program(), Dump(tmp_path)
    dump.start(program)
    dump.mark("joint", program)
    for _ in range(2):
        dump.mark("step", program)
        Pipeline((Dedupe(),)).run(program, observer=dump.observe)
        dump.finish("x = 1\n", PlainReport())
    first, second = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("step-1", "step-2"))
    assert first == second
    assert "02-step.txt" in first and "04-emitted.py" in first


def test_a_graph_that_was_not_captured_begins_with_its_first_stage(tmp_path: Path):
    dump = Dump(tmp_path, "window-update")
    dump.mark("window-update", small_program())
    assert (tmp_path / "window-update-1" / "00-window-update.txt").is_file()


def test_names_cannot_leave_the_folder(tmp_path: Path):
    dump = Dump(tmp_path, "../step")
    dump.start(small_program())
    dump.mark("../../evil name", small_program())
    assert [path.name for path in tmp_path.iterdir()] == ["..-step-1"]
    assert (tmp_path / "..-step-1" / "01-..-..-evil-name.txt").is_file()


def test_a_file_in_the_way_is_an_error_at_once(tmp_path: Path):
    (tmp_path / "dump").write_text("a file")
    with pytest.raises(GraphoptError, match="expected a folder that dumps can be written into"):
        Dump(tmp_path / "dump")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_an_error_at_once(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(GraphoptError, match="Permission denied"):
        Dump(tmp_path)


def test_compile_refuses_an_unwritable_folder(tmp_path: Path):
    (tmp_path / "dump").write_text("a file")
    model, _ = two_layers()
    with pytest.raises(GraphoptError):
        graphopt.compile(model, outputs=["loss"], dump=tmp_path / "dump")


# ---- whole models -------------------------------------------------------------------------------------------------


def test_numeric_and_keyword_module_names_parse(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ModuleDict({"lambda": nn.Linear(4, 2)}))
    model.forward = lambda x: {"loss": model[2]["lambda"](model[1](model[0](x))).sum()}  # type: ignore[method-assign]
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.AdamW(), dump=tmp_path)
    step(torch.randn(3, 4))
    (folder,) = tmp_path.iterdir()
    assert_parses(folder)
    text = (folder / "00-captured.txt").read_text()
    assert "# 2.lambda" in text and "f32[3,4]" in text


def test_control_characters_in_names_stay_inside_comments(tmp_path: Path):
    executable = step_executable()
    program = executable.program
    first = replace(program.signature.inputs[0], name="line\nbreak")
    program.signature = Signature((first, *program.signature.inputs[1:]), program.signature.outputs)
    program.origins = dict.fromkeys(program.origins, Origin("a\nb\rc\x0cd\u2028e", "model.py:1", "x = 1"))
    dump = Dump(tmp_path)
    folder = dump.start(program)
    dump.finish(emit_source(program, executable.plan, title="step"), PlainReport())
    assert_parses(folder)
    assert "line\\nbreak" in (folder / "00-captured.txt").read_text()


def test_two_models_shapes_and_steps_share_no_file(tmp_path: Path):
    for width in (4, 8):
        model = nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        step = graphopt.compile(
            model, loss=lambda output, batch: output.sum(), optimizer=graphopt.optim.SGD(lr=0.1), dump=tmp_path
        )
        for batch_size in (2, 3, 2):
            step(torch.randn(batch_size, width))
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 4
    for folder in folders:
        assert_parses(folder)
        names = " ".join(path.name for path in folder.iterdir())
        assert all(stage in names for stage in ("captured", "joint", "step", "emitted", "report.html", "memory.md"))


def test_size_does_not_grow_with_the_weights(tmp_path: Path):
    def dumped_bytes(width: int) -> int:
        model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        model.register_buffer("table", torch.randn(width, width))
        folder = tmp_path / str(width)
        step = graphopt.compile(
            model, loss=lambda output, batch: output.sum(), optimizer=graphopt.optim.SGD(lr=0.1), dump=folder
        )
        step(torch.randn(4, width))
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    small, large = dumped_bytes(16), dumped_bytes(512)
    # Numbers in shapes and byte counts get longer, nothing else.
    assert large < 1.1 * small


def test_dumping_changes_no_number(tmp_path: Path):
    def losses(dump: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        step = graphopt.compile(
            model, loss=lambda output, batch: output.sum(), optimizer=graphopt.optim.AdamW(lr=0.1), dump=dump
        )
        return [step(torch.randn(3, 4)).loss for _ in range(4)]

    with_dump, without = losses(tmp_path), losses(None)
    assert all(torch.equal(left, right) for left, right in zip(with_dump, without, strict=True))
