"""Saving and loading models: ties and views, and never a half-loaded model (C71)."""

from __future__ import annotations

import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

from graphopt.errors import DataError, UnsupportedError
from graphopt.train.saving import load_checkpoint, load_model, save_checkpoint, save_model
from tests.support.saving import (
    FakeStep,
    OnlyTied,
    TiedLM,
    model_of,
    same_tree,
    snapshot,
    step_of,
)


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
