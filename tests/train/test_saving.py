"""Saving and loading: ties and views, whole or not at all, and never a half-loaded model."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.errors import DataError, GraphoptError, UnsupportedError
from graphopt.train.replace_file import SaveError
from graphopt.train.saving import load_checkpoint, load_model, save_checkpoint, save_model


class TiedLM(nn.Module):
    """Tied embedding and head, a parameter that is a view of another, a batch norm, a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight
        self.base = nn.Parameter(torch.randn(6, 4))
        self.rows = nn.Parameter(self.base.detach()[2:4])
        self.turned = nn.Parameter(self.base.detach().t())
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.arange(5.0), persistent=False)


class OnlyTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight


class FakeStep:
    """The part of a TrainStep that saving needs."""

    def __init__(self, state: dict | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def step_of(count: int) -> FakeStep:
    """A step whose every part says which step it is of."""
    moments = {"embed.weight": torch.full((11, 8), float(count)), "codes": torch.full((300,), count, dtype=torch.uint8)}
    return FakeStep({"optimizer": moments, "scaler": {"scale": 2.0**count}, "count": count})


def model_of(count: int) -> TiedLM:
    model = TiedLM()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(count)
    return model


def same_tree(first: object, second: object) -> bool:
    """Equal in type, structure and bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same_kind = first.dtype == second.dtype and first.shape == second.shape
        return same_kind and first.numpy().tobytes() == second.numpy().tobytes()
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(same_tree(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same_tree, first, second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return first == second


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {name: copy.contiguous() for name, copy in copies.items()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- shared tensors (C71) ----------------------------------------------------------------------------------------------


def test_stores_a_tied_tensor_once_and_names_the_alias(tmp_path):
    model = TiedLM()
    save_model(tmp_path / "m.safetensors", model)
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert "embed.weight" in file.keys() and "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert '"lm_head.weight": "embed.weight"' in file.metadata()["graphopt"]
    once = sum(t.nbytes for name, t in model.state_dict().items() if name != "lm_head.weight")
    header_bytes = 4096
    assert (tmp_path / "m.safetensors").stat().st_size <= once + header_bytes


def test_loads_values_in_place_and_keeps_ties_and_views(tmp_path):
    saved, fresh = TiedLM(), TiedLM()
    save_model(tmp_path / "m.safetensors", saved)
    addresses = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()}
    fresh.positions.fill_(-1)
    load_model(tmp_path / "m.safetensors", fresh)
    assert {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()} == addresses
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in fresh.state_dict().items())
    assert fresh.lm_head.weight is fresh.embed.weight
    assert fresh.rows.data_ptr() == fresh.base[2:4].data_ptr() and torch.equal(fresh.rows, saved.base[2:4])
    assert fresh.positions.eq(-1).all(), "a non-persistent buffer is not part of the file"


def test_saving_does_not_copy_what_need_not_be_copied(tmp_path, monkeypatch):
    written: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(
        safetensors.torch, "save_file", lambda tensors, path, metadata: written.update(tensors) or path.touch()
    )
    model = TiedLM()
    save_model(tmp_path / "m.safetensors", model)
    kept = {name for name, tensor in written.items() if tensor.data_ptr() == model.state_dict()[name].data_ptr()}
    assert set(written) - kept == {"rows", "turned"}


def test_a_plain_model_reads_the_file_with_safetensors_alone(tmp_path):
    saved, plain = OnlyTied(), OnlyTied()
    save_model(tmp_path / "m.safetensors", saved)
    safetensors.torch.load_model(plain, tmp_path / "m.safetensors")
    assert torch.equal(plain.lm_head.weight, saved.lm_head.weight)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed.weight"])
def test_one_name_of_a_tie_is_enough(tmp_path, name):
    weight, model = torch.randn(11, 8), OnlyTied()
    safetensors.torch.save_file({name: weight}, tmp_path / "m.safetensors")
    load_model(tmp_path / "m.safetensors", model)
    assert torch.equal(model.embed.weight, weight) and model.lm_head.weight is model.embed.weight


def test_both_names_with_equal_values_load(tmp_path):
    weight, model = torch.randn(11, 8), OnlyTied()
    weight[0, 0] = float("nan")
    safetensors.torch.save_file({"embed.weight": weight, "lm_head.weight": weight.clone()}, tmp_path / "m.safetensors")
    load_model(tmp_path / "m.safetensors", model)
    assert torch.equal(model.embed.weight.nan_to_num(), weight.nan_to_num())


def test_both_names_with_different_values_are_refused_by_name(tmp_path):
    values = {"embed.weight": torch.zeros(11, 8), "lm_head.weight": torch.ones(11, 8)}
    safetensors.torch.save_file(values, tmp_path / "m.safetensors")
    model = OnlyTied()
    before = snapshot(model)
    with pytest.raises(DataError, match=r"embed\.weight and lm_head\.weight"):
        load_model(tmp_path / "m.safetensors", model)
    assert same_tree(snapshot(model), before)


def test_a_view_that_contradicts_its_base_is_refused(tmp_path):
    values = {**snapshot(TiedLM()), "rows": torch.full((2, 4), 9.0)}
    safetensors.torch.save_file(values, tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=r"base and rows|rows and base"):
        load_model(tmp_path / "m.safetensors", TiedLM())


def test_a_view_may_be_missing_when_its_base_is_there_but_not_the_reverse(tmp_path):
    values = snapshot(TiedLM())
    safetensors.torch.save_file({n: v for n, v in values.items() if n not in ("rows", "turned")}, tmp_path / "base")
    safetensors.torch.save_file({n: v for n, v in values.items() if n not in ("base", "turned")}, tmp_path / "rows")
    model = TiedLM()
    load_model(tmp_path / "base", model)
    assert torch.equal(model.rows, values["base"][2:4])
    with pytest.raises(DataError, match="missing in the file: base"):
        load_model(tmp_path / "rows", model)


def test_a_file_of_a_tied_model_fills_both_tensors_of_an_untied_one(tmp_path):
    saved, untied = OnlyTied(), OnlyTied()
    untied.lm_head.weight = nn.Parameter(torch.zeros(11, 8))
    save_model(tmp_path / "m.safetensors", saved)
    load_model(tmp_path / "m.safetensors", untied)
    assert torch.equal(untied.lm_head.weight, saved.embed.weight)
    assert torch.equal(untied.embed.weight, saved.embed.weight)


def test_loads_a_torch_file_without_running_code_from_it(tmp_path):
    saved, fresh = TiedLM(), TiedLM()
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    torch.save({"model": saved}, tmp_path / "pickled.pt")
    load_model(tmp_path / "m.pt", fresh)
    assert same_tree(snapshot(fresh), snapshot(saved))
    with pytest.raises(DataError, match=r"save model\.state_dict"):
        load_model(tmp_path / "pickled.pt", fresh)
    with pytest.raises(DataError, match="not one"):
        load_checkpoint(tmp_path / "m.pt", model=fresh)


@pytest.mark.parametrize("value", [{"epoch": 3}, [torch.ones(2)]])
def test_a_torch_file_that_is_no_state_dict_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "m.pt")
    with pytest.raises(DataError, match="dict of tensors by name"):
        load_model(tmp_path / "m.pt", TiedLM())


# -- what does not fit is refused whole --------------------------------------------------------------------------------


def test_missing_different_and_unexpected_names_are_listed_together(tmp_path):
    values = snapshot(TiedLM())
    del values["norm.bias"]
    values |= {"base": torch.zeros(6, 5), "norm.weight": torch.zeros(3, dtype=torch.bfloat16), "other": torch.zeros(1)}
    safetensors.torch.save_file(values, tmp_path / "m.safetensors")
    model = TiedLM()
    before = snapshot(model)
    with pytest.raises(DataError) as caught:
        load_model(tmp_path / "m.safetensors", model)
    assert "missing in the file: norm.bias" in str(caught.value)
    assert "base (expected float32[6, 4], came float32[6, 5])" in str(caught.value)
    assert "norm.weight (expected float32[3], came bfloat16[3])" in str(caught.value)
    assert "not in the model: other" in str(caught.value)
    assert same_tree(snapshot(model), before)


def test_unexpected_names_pass_when_not_strict_and_missing_ones_never(tmp_path):
    values = {"embed.weight": torch.randn(11, 8), "other": torch.zeros(1)}
    safetensors.torch.save_file(values, tmp_path / "more")
    safetensors.torch.save_file({"other": torch.zeros(1)}, tmp_path / "less")
    model = OnlyTied()
    load_model(tmp_path / "more", model, strict=False)
    assert torch.equal(model.embed.weight, values["embed.weight"])
    with pytest.raises(DataError, match=r"missing in the file: embed\.weight, lm_head\.weight"):
        load_model(tmp_path / "less", model, strict=False)


def test_the_model_is_untouched_when_the_step_refuses_its_state(tmp_path):
    class Refusing(FakeStep):
        def load_state_dict(self, state):
            raise ValueError("another block size")

    save_checkpoint(tmp_path / "c", model=model_of(1), step=step_of(1))
    model = model_of(2)
    with pytest.raises(ValueError, match="another block size"):
        load_checkpoint(tmp_path / "c", model=model, step=Refusing())
    assert same_tree(snapshot(model), snapshot(model_of(2)))


def test_the_step_is_untouched_when_the_model_does_not_fit(tmp_path):
    save_checkpoint(tmp_path / "c", model=model_of(1), step=step_of(1))
    step = step_of(2)
    with pytest.raises(DataError):
        load_checkpoint(tmp_path / "c", model=nn.Linear(2, 2), step=step)
    assert step.state["count"] == 2


def test_a_model_file_has_no_training_state_to_resume_from(tmp_path):
    save_model(tmp_path / "m", TiedLM())
    with pytest.raises(DataError, match="no training state"):
        load_checkpoint(tmp_path / "m", step=FakeStep())


def test_a_model_without_memory_is_refused(tmp_path):
    save_model(tmp_path / "m", nn.Linear(2, 2))
    with pytest.raises(DataError, match="meta device"):
        load_model(tmp_path / "m", nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedError, match="meta"):
        save_model(tmp_path / "n", nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_a_truncated_file_is_a_clear_error(tmp_path, keep):
    save_checkpoint(tmp_path / "c", model=model_of(1), step=step_of(1))
    content = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    model = model_of(2)
    with pytest.raises(DataError, match="complete safetensors file"):
        load_checkpoint(tmp_path / "c", model=model, step=FakeStep())
    assert same_tree(snapshot(model), snapshot(model_of(2)))


def test_a_truncated_torch_file_is_a_clear_error(tmp_path):
    torch.save(TiedLM().state_dict(), tmp_path / "m.pt")
    content = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError):
        load_model(tmp_path / "m.pt", TiedLM())


def test_other_files_folders_and_missing_files_are_clear_errors(tmp_path):
    (tmp_path / "text").write_text("hello, this is no checkpoint")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("a", "b")
    for name in ("text", "zip", "missing", "."):
        with pytest.raises(DataError):
            load_model(tmp_path / name, TiedLM())


@pytest.mark.parametrize("header", ["not json", "{}", '{"version": 99, "aliases": {}}', '{"version": 1, "aliases": 3}',
                                    '{"version": 1, "aliases": {}, "step": {"dict": [["a", {"tensor": "gone"}]]}}',
                                    '{"version": 1, "aliases": {}, "step": {"code": "os.system"}}'])  # fmt: skip
def test_a_damaged_header_is_a_clear_error(tmp_path, header):
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "c", metadata={"graphopt": header})
    with pytest.raises(DataError):
        load_checkpoint(tmp_path / "c", step=FakeStep())


# -- whole or not at all (C72) -----------------------------------------------------------------------------------------


def half_writer(error: BaseException):
    """A save_file that is stopped by ``error`` after half of the bytes."""
    real = safetensors.torch.save_file

    def save_file(tensors, path, metadata=None):
        real(tensors, path, metadata=metadata)
        content = Path(path).read_bytes()
        Path(path).write_bytes(content[: len(content) // 2])
        raise error

    return save_file


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


# -- training state ----------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool]
KEYS = st.text(max_size=6) | st.integers(-3, 300)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@st.composite
def state_tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


STATES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS | state_tensors(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def comparable(value):
    """``value`` with contiguous tensors in a dtype that numpy has."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous()
        return value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return {key: comparable(child) for key, child in value.items()}
    return type(value)(map(comparable, value)) if isinstance(value, (list, tuple)) else value


@given(state=STATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_training_state_comes_back_as_it_was(tmp_path, state):
    save_checkpoint(tmp_path / "c", model=nn.Linear(1, 1), step=FakeStep(state), extra={"epoch": 2})
    step = FakeStep()
    assert load_checkpoint(tmp_path / "c", step=step) == {"epoch": 2}
    assert same_tree(comparable(step.state), comparable(state))


def test_keeps_the_state_of_an_optimizer_in_its_dtypes(tmp_path):
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model=model, step=optimizer)
    step = FakeStep()
    load_checkpoint(tmp_path / "c", step=step)
    assert same_tree(comparable(step.state), comparable(optimizer.state_dict()))


def test_loaded_state_does_not_depend_on_the_file(tmp_path):
    save_checkpoint(tmp_path / "c", model=model_of(1), step=step_of(7))
    step = FakeStep()
    load_checkpoint(tmp_path / "c", step=step)
    (tmp_path / "c").write_bytes(b"")
    assert same_tree(step.state, step_of(7).state)


def test_state_that_is_the_model_s_own_tensor_is_stored_once(tmp_path):
    model = nn.Linear(300, 300)
    save_checkpoint(tmp_path / "c", model=model, step=FakeStep({"master": model.weight.detach()}))
    step = FakeStep()
    load_checkpoint(tmp_path / "c", step=step)
    assert (tmp_path / "c").stat().st_size < 1.5 * model.weight.nbytes
    assert (
        torch.equal(step.state["master"], model.weight) and step.state["master"].data_ptr() != model.weight.data_ptr()
    )


def test_state_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(UnsupportedError, match=r"set at 'a\.1'"):
        save_checkpoint(tmp_path / "c", model=nn.Linear(1, 1), step=FakeStep({"a": [1, {2}]}))
    with pytest.raises(UnsupportedError, match="JSON"):
        save_checkpoint(tmp_path / "c", model=nn.Linear(1, 1), extra={"a": torch.ones(1)})
    with pytest.raises(UnsupportedError, match=r"'step/a' has dtype torch\.complex128"):
        save_checkpoint(
            tmp_path / "c", model=nn.Linear(1, 1), step=FakeStep({"a": torch.zeros(1, dtype=torch.complex128)})
        )
    assert names_in(tmp_path) == []


def test_extra_state_of_modules_is_part_of_the_model(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen, "marks": torch.tensor([self.seen])}

        def set_extra_state(self, state):
            self.seen = state["seen"] + int(state["marks"])

    saved, fresh = Counting(2, 2), Counting(2, 2)
    saved.seen = 4
    save_model(tmp_path / "m", saved)
    load_model(tmp_path / "m", fresh)
    assert fresh.seen == 8 and torch.equal(fresh.weight, saved.weight)


# -- with compiled steps -----------------------------------------------------------------------------------------------


class SmallLM(OnlyTied):
    """A tied LM with dropout, so that the random state matters, and a batch norm, so that buffers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)

    def forward(self, ids):
        hidden = self.drop(self.norm(self.embed(ids).flatten(0, 1)))
        logits = self.lm_head(hidden).unflatten(0, ids.shape)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}


def compiled_of(model: SmallLM, *, accumulate: int = 1):
    optimizer = graphopt.optim.AdamW(lr=1e-2, weight_decay=0.01)
    return graphopt.compile(model, ["loss"], optimizer=optimizer, accumulate=accumulate)


def batches(first: int, last: int):
    return [torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(n)) for n in range(first, last)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_resumes_bit_by_bit_in_a_fresh_compiled_step(tmp_path, accumulate):
    model = SmallLM()
    step = compiled_of(model, accumulate=accumulate)
    for ids in batches(0, 3):
        step(ids)
    save_checkpoint(tmp_path / "c", model=model, step=step, extra={"next": 3})
    expected = [step(ids).loss for ids in batches(3, 6)]

    fresh = SmallLM()
    resumed = compiled_of(fresh, accumulate=accumulate)
    first = load_checkpoint(tmp_path / "c", model=fresh, step=resumed)["next"]
    losses = [resumed(ids).loss for ids in batches(first, 6)]
    assert all(map(torch.equal, losses, expected))
    assert same_tree(snapshot(fresh), snapshot(model))
    assert fresh.lm_head.weight is fresh.embed.weight


def test_a_running_compiled_step_goes_on_from_a_loaded_checkpoint(tmp_path):
    model = SmallLM()
    step = compiled_of(model)
    step(batches(0, 1)[0])
    save_checkpoint(tmp_path / "c", model=model, step=step)
    expected = step(batches(1, 2)[0]).loss
    assert not torch.equal(step(batches(1, 2)[0]).loss, expected)
    load_checkpoint(tmp_path / "c", model=model, step=step)
    assert torch.equal(step(batches(1, 2)[0]).loss, expected)


def test_a_failed_save_leaves_a_compiled_step_as_it_was(tmp_path, monkeypatch):
    losses = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = SmallLM()
        step = compiled_of(model)
        step(batches(0, 1)[0])
        if fails:
            monkeypatch.setattr(safetensors.torch, "save_file", half_writer(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path / "c", model=model, step=step)
        losses.append(step(batches(1, 2)[0]).loss)
    assert torch.equal(*losses)


def test_a_compiled_module_and_the_plain_model_read_each_others_files(tmp_path):
    plain = SmallLM()
    compiled = graphopt.compile(SmallLM(), ["loss"])
    save_model(tmp_path / "plain", plain)
    load_model(tmp_path / "plain", compiled)
    save_model(tmp_path / "compiled", compiled)
    assert same_tree(snapshot(compiled), snapshot(plain))
    load_model(tmp_path / "compiled", fresh := SmallLM())
    assert same_tree(snapshot(fresh), snapshot(plain))


def test_a_step_of_another_optimizer_is_refused_before_the_model_changes(tmp_path):
    save_checkpoint(tmp_path / "c", model=SmallLM(), step=compiled_of(SmallLM()))
    model = SmallLM()
    before = snapshot(model)
    step = graphopt.compile(model, ["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    with pytest.raises(GraphoptError, match="AdamW"):
        load_checkpoint(tmp_path / "c", model=model, step=step)
    assert same_tree(snapshot(model), before)
