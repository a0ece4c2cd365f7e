"""A save happens whole or not at all, whatever interrupts it (C72)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading

import pytest
import safetensors.torch
from torch import nn

from graphopt.errors import GraphoptError
from graphopt.train.replace_file import SaveError
from graphopt.train.saving import load_checkpoint, load_model, save_checkpoint, save_model
from tests.support.saving import (
    FakeStep,
    TiedLM,
    half_writer,
    model_of,
    names_in,
    same_tree,
    snapshot,
    step_of,
)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()])
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    save_checkpoint(tmp_path / "c", model=model_of(1), step=step_of(1), extra={"step": 1})
    model, step = model_of(2), step_of(2)
    monkeypatch.setattr(safetensors.torch, "save_file", half_writer(error))
    with pytest.raises(type(error)):
        save_checkpoint(tmp_path / "c", model=model, step=step, extra={"step": 2})
    monkeypatch.undo()
    assert names_in(tmp_path) == ["c"]
    assert same_tree(snapshot(model), snapshot(model_of(2))) and same_tree(step.state, step_of(2).state)
    assert load_checkpoint(tmp_path / "c", model=model, step=step) == {"step": 1}
    assert same_tree(snapshot(model), snapshot(model_of(1))) and same_tree(step.state, step_of(1).state)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_after_writing_leaves_the_old_file(tmp_path, monkeypatch, call, error):
    save_checkpoint(tmp_path / "c", model=model_of(1), step=step_of(1))

    def fail(*arguments, **keywords):
        raise error("stopped")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(error):
        save_checkpoint(tmp_path / "c", model=model_of(2), step=step_of(2))
    monkeypatch.undo()
    step = FakeStep()
    load_checkpoint(tmp_path / "c", model=(model := TiedLM()), step=step)
    assert names_in(tmp_path) == ["c"] and step.state["count"] == 1 and model.base.eq(1).all()


LIMITED_SAVE = """
import resource, sys, torch
from graphopt.train.saving import save_model
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    save_model(sys.argv[1], torch.nn.Linear(300, 300))
except OSError as error:
    print(type(error).__name__, error)
"""

KILLED_SAVE = """
import os, pathlib, sys, safetensors.torch, torch
from graphopt.train.saving import save_model
def die(tensors, path, metadata=None):
    pathlib.Path(path).write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)
safetensors.torch.save_file = die
save_model(sys.argv[1], torch.nn.Linear(3, 3))
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limits")
def test_a_real_write_error_leaves_the_old_file(tmp_path):
    save_model(tmp_path / "m", nn.Linear(3, 3))
    before = (tmp_path / "m").read_bytes()
    result = run_script(LIMITED_SAVE, str(tmp_path / "m"))
    assert result.stdout.startswith("SaveError could not write"), result
    assert (tmp_path / "m").read_bytes() == before and names_in(tmp_path) == ["m"]


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9")
def test_what_a_killed_save_leaves_is_cleaned_by_the_next(tmp_path):
    save_model(tmp_path / "m", nn.Linear(3, 3))
    (tmp_path / ".m.keep").mkdir()
    run_script(KILLED_SAVE, str(tmp_path / "m"))
    left = {name for name in names_in(tmp_path) if name.endswith(".tmp")}
    load_model(tmp_path / "m", nn.Linear(3, 3))
    save_model(tmp_path / "m", nn.Linear(3, 3))
    assert len(left) == 1 and names_in(tmp_path) == [".m.keep", "m"]


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "m", tmp_path / "folder"):
        with pytest.raises(SaveError, match="could not write") as caught:
            save_model(path, nn.Linear(2, 2))
        assert isinstance(caught.value, GraphoptError) and isinstance(caught.value, OSError)
    assert names_in(tmp_path) == ["file", "folder"] and names_in(tmp_path / "folder") == []


def test_a_read_only_folder_is_a_clear_error(tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):  # the tests may run as root, whom no mode stops
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(SaveError, match="Permission denied; nothing was written"):
        save_model(tmp_path / "m", nn.Linear(2, 2))


def test_a_concurrent_reader_sees_one_save_and_never_two(tmp_path):
    save_checkpoint(tmp_path / "c", model=model_of(0), step=step_of(0), extra={"count": 0})
    stop = threading.Event()

    def keep_saving():
        for count in range(1, 60):
            save_checkpoint(tmp_path / "c", model=model_of(count), step=step_of(count), extra={"count": count})
        stop.set()

    writer = threading.Thread(target=keep_saving)
    writer.start()
    model, step, seen = TiedLM(), FakeStep(), set()
    while not stop.is_set():
        count = load_checkpoint(tmp_path / "c", model=model, step=step)["count"]
        assert same_tree(snapshot(model), snapshot(model_of(count))) and same_tree(step.state, step_of(count).state)
        seen.add(count)
    writer.join()
    assert len(seen) > 1


def test_two_savers_of_one_path_do_not_remove_each_others_files(tmp_path):
    errors: list[BaseException] = []

    def keep_saving(count):
        try:
            for _ in range(20):
                save_checkpoint(tmp_path / "c", model=model_of(count), step=step_of(count))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=keep_saving, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load_checkpoint(tmp_path / "c", model=TiedLM())
    assert errors == [] and names_in(tmp_path) == ["c"]


def test_an_error_of_the_writer_comes_through_whatever_it_is(tmp_path, monkeypatch):
    for error in (FileNotFoundError(2, "gone"), RuntimeError("other")):
        monkeypatch.setattr(safetensors.torch, "save_file", half_writer(error))
        with pytest.raises(OSError if isinstance(error, OSError) else RuntimeError, match=r"gone|other"):
            save_model(tmp_path / "m", nn.Linear(2, 2))
        monkeypatch.undo()
    assert names_in(tmp_path) == []


def test_keeps_usual_permissions_links_and_missing_folders(tmp_path):
    path = tmp_path / "runs" / "one" / "m"
    save_model(path, nn.Linear(2, 2))
    (tmp_path / "plain").touch()
    (tmp_path / "link").symlink_to(path)
    save_model(tmp_path / "link", nn.Linear(3, 3))
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "link").is_symlink()
    load_model(path, nn.Linear(3, 3))
