"""The command line: what each command prints, and that a user's mistake is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphopt
from graphopt.cli import app, run
from graphopt.passes import BY_NAME

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        logits = self.second(self.first(x).relu())
        return {"logits": logits, "loss": (logits - 1).square().sum()}

def make():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(3, 4)}

def make_tuple():
    return Model(), (torch.randn(3, 4),)

def only_model():
    return Model()

def no_module():
    return 3, {}

def bad_batch():
    return Model(), 7

def fails():
    raise RuntimeError("no weights\\nhere")
"""

PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
from graphopt.pipeline.pass_base import Changes, Pass

@dataclass(frozen=True)
class SwapSub(Pass):
    """Swap the operands of every subtraction: wrong."""

    name: ClassVar[str] = "swap-sub"
    strength: int = 3

    def apply(self, program):
        found = [node for node in program.ops() if node.target is torch.ops.aten.sub.Tensor]
        for node in found:
            one = program.insert_before(node, torch.ops.aten.full_like.default, node.args[0], 1)
            node.args = (one, node.args[0])
        return Changes(len(found))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "broken.py").write_text("def make(:\n")
    return tmp_path


def command(*arguments: object) -> str:
    """The standard output of a command that succeeds."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_version():
    assert command("version").strip() == graphopt.__version__


def test_help_without_a_command():
    assert "bisect" in command()


def test_passes_lists_every_pass_with_its_options():
    text = command("passes")
    assert all(name in text for name in BY_NAME)
    assert "Drop what nothing needs" in text
    assert "max_bytes: int = 65536" in text


def test_passes_lists_those_of_a_plugin(folder: Path):
    text = command("passes", "--plugin", folder / "plugin.py")
    assert "swap-sub" in text and "strength: int = 3" in text and "Swap the operands" in text


@pytest.mark.parametrize("make", ["make", "make_tuple"])
def test_dump_writes_every_stage(folder: Path, make: str):
    text = command("dump", f"{folder}/model.py:{make}", "--outputs", "loss", "--dir", folder / "dumps")
    (dump,) = (folder / "dumps").iterdir()
    names = " ".join(path.name for path in dump.iterdir())
    assert f"written to {dump}" in text and "memory at the peak" in text
    assert all(stage in names for stage in ("00-captured", "joint", "forward-backward", "emitted.py", "report.html"))


def test_dump_explains_what_runs_in_fp8(folder: Path):
    arguments = ["dump", f"{folder}/model.py:make", "--dir", folder / "dumps", "--explain-fp8"]
    text = command(*arguments)
    assert "FP8, recipe tensorwise, on cpu (emulation: costs are not counted): 0 of 5 products" in text
    assert "padding does not pay: output features 8 to 16" in text and "memory at the peak" not in text
    assert "below break-even on H100" in command(*arguments, "--fp8", "rowwise", "--target", "h100")
    # The recipe's own target counts unless --target is given.
    own = ("--fp8", "rowwise;target=H100")
    assert "on H100" in command(*arguments, *own) and "on A100" in command(*arguments, *own, "--target", "A100")


def test_diff_names_what_differs(folder: Path):
    for outputs in ("loss", "loss,logits"):
        command("dump", f"{folder}/model.py:make", "--outputs", outputs, "--dir", folder / "dumps")
    first, second = sorted((folder / "dumps").iterdir())
    assert "first in 00-captured.txt" in command("diff", first, second)
    assert "no difference" in command("diff", first, first)


def test_bisect_finds_that_the_default_passes_hold(folder: Path):
    assert "passes keep their contract" in command("bisect", f"{folder}/model.py:make", "--outputs", "loss")


@pytest.mark.parametrize("arguments", [("--precision", "bf16"), ("--fp8", "rowwise;include=*")], ids=" ".join)
def test_bisect_runs_the_passes_of_low_precision(arguments: tuple[str, str], folder: Path):
    plain = command("bisect", f"{folder}/model.py:make")
    lowered = command("bisect", f"{folder}/model.py:make", *arguments)
    assert "passes keep their contract" in lowered and lowered != plain  # more of them


def test_bisect_names_a_broken_pass_of_a_plugin_and_exits_with_1(folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["bisect", f"{folder}/model.py:make", "--plugin", str(folder / "plugin.py")]
    assert run([*arguments, "--passes", "drop-dead,swap-sub,dedupe"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("swap-sub (pass 2 of 3) is the first that breaks")
    assert "grad second.weight: max |difference|" in text


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    demo = pytest.importorskip("graphopt.train.demo")
    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda **options: calls.append(options))
    command("demo", "--steps", "7", "--out", tmp_path)
    assert calls == [{"text": None, "steps": 7, "out": tmp_path}]


MISTAKES = [
    (["dump", "nowhere.py:make"], "expected a Python file, came 'nowhere.py', which does not exist"),
    (["dump", "{folder}/model.py"], "expected MODEL.py:make"),
    (["dump", "{folder}/model.py:build"], "has no function 'build'; it has make, make_tuple"),
    (["dump", "{folder}/model.py:only_model"], "to return (model, batch), came Model"),
    (["dump", "{folder}/model.py:no_module"], "with a torch.nn.Module first, came int"),
    (["dump", "{folder}/model.py:bad_batch"], "a batch that is a dict or a tuple, came int"),
    (["dump", "{folder}/model.py:fails"], "RuntimeError: no weights here"),
    (["dump", "{folder}/broken.py:make"], "SyntaxError"),
    (["dump", "{folder}/model.py:make", "--outputs", "lost"], "no output 'lost'; did you mean 'loss'?"),
    (["dump", "{folder}/model.py:make", "--outputs", ","], "--outputs expects names"),
    (["dump", "{folder}/model.py:make", "--passes", "drop-deed"], "no pass is called 'drop-deed'"),
    (["dump", "{folder}/model.py:make", "--dir", "{folder}/model.py"], "expected a folder that dumps can be written"),
    (["dump", "{folder}/model.py:make", "--fp8", "colwise"], "an FP8 recipe is one of tensorwise, rowwise"),
    (["dump", "{folder}/model.py:make", "--target", "V100"], "target expects one of A100, L4,"),
    (["dump", "{folder}/model.py:make", "--explain-fp8", "--passes", "dedupe"], "expect the default passes"),
    (
        ["dump", "{folder}/model.py:make", "--explain-fp8", "--precision", "bf16"],
        "expects --precision fp8, came 'bf16'",
    ),
    (["bisect", "{folder}/model.py:make", "--precision", "bf16", "--fp8", "rowwise"], "expect --precision fp8"),
    (["bisect", "{folder}/model.py:make", "--precision", "rowwise"], "a recipe of FP8 is given by --fp8"),
    (["bisect", "{folder}/model.py:make", "--precision", "fp8", "--passes", "dedupe"], "expect the default passes"),
    (["dump", "{folder}/model.py:make", "--plugin", "{folder}/plugin.py"], "--plugin expects --passes"),
    (["passes", "--plugin", "{folder}/model.py"], "expected a file that defines subclasses"),
    (["diff", "{folder}/a", "{folder}/b"], "which is no folder"),
    (["demo", "--text", "{folder}/none.txt"], "expected a text file"),
    (["demo", "--steps", "0"], "Invalid value for '--steps'"),
    (["frobnicate"], "No such command 'frobnicate'"),
    (["dump"], "Missing argument 'MODEL.py:make'"),
    (["dump", "x.py:make", "--speed"], "No such option"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    status = run([argument.replace("{folder}", str(folder)) for argument in arguments])
    streams = capsys.readouterr()
    assert status == 2
    assert streams.out == ""
    assert streams.err.count("\n") == 1 and streams.err.startswith("graphopt: ")
    assert message in streams.err


@pytest.mark.parametrize("position", [0, 2])
def test_traceback_shows_where_a_mistake_was_found(position: int):
    arguments = ["dump", "nowhere.py:make"]
    arguments.insert(position, "--traceback")
    with pytest.raises(graphopt.errors.DataError):
        run(arguments)


def test_the_module_runs_as_a_program(folder: Path):
    process = [sys.executable, "-m", "graphopt"]
    good = subprocess.run([*process, "version"], capture_output=True, text=True)
    bad = subprocess.run([*process, "dump", "nowhere.py:make"], capture_output=True, text=True, cwd=folder)
    assert (good.returncode, good.stdout) == (0, f"{graphopt.__version__}\n")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
