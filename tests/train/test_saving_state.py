"""Training state: what comes back is what was saved, and compiled steps resume bit by bit."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.errors import GraphoptError, UnsupportedError
from graphopt.train.saving import load_checkpoint, load_model, save_checkpoint, save_model
from tests.support.saving import (
    FakeStep,
    OnlyTied,
    comparable,
    half_writer,
    model_of,
    names_in,
    same_tree,
    snapshot,
    step_of,
)

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
