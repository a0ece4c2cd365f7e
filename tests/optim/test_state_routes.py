"""Training state by every route: native, files, torch's form; the same bits after each, or an error that says why."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import StateError
from graphopt.optim.state import Weights
from tests.support.eight_bit import (
    OPTIMIZERS,
    SMALL,
    assert_same_run,
    batches,
    odd_model,
    run,
    same_bits,
    same_state,
    state_of,
    step_of,
)


def by_state_dict(saved, tmp_path):
    return copy.deepcopy(saved)


def by_pickle(saved, tmp_path):
    return pickle.loads(pickle.dumps(saved))


def by_weights_only(saved, tmp_path):
    stream = io.BytesIO()
    torch.save(saved, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


ROUTES = [by_state_dict, by_pickle, by_weights_only]


def resumed(step, name, weights, dtype):
    """A model and a step as another process would make them, the model's values copied."""
    model = odd_model(dtype)
    model.load_state_dict(step.model.state_dict())
    return step_of(model, OPTIMIZERS[name], weights)


CASES = [
    *((name, torch.float32, Weights.OWN) for name in OPTIMIZERS),
    *((name, torch.bfloat16, Weights.OWN) for name in ("sgd", "adamw", "adamw8bit", "lion8bit")),
    *(
        (name, torch.bfloat16, weights)
        for name in ("adamw", "adamw8bit", "lion")
        for weights in (Weights.MASTER, Weights.STOCHASTIC, Weights.REMAINDER)
    ),
]


@pytest.mark.parametrize(("name", "dtype", "weights"), CASES)
def test_resuming_at_any_step_gives_the_same_bits(name, dtype, weights, tmp_path):
    items = batches(5)
    straight = step_of(odd_model(dtype), OPTIMIZERS[name], weights)
    saved = {}
    for done, batch in enumerate(items):
        graphopt.save_checkpoint(tmp_path / f"{done}.safetensors", model=straight.model, step=straight)
        saved[done] = copy.deepcopy((straight.state_dict(), straight.model.state_dict()))
        straight(**batch)
    again = step_of(odd_model(dtype), OPTIMIZERS[name], weights)
    for done in (3, 0, 1):  # each over what the one before has left
        graphopt.load_checkpoint(tmp_path / f"{done}.safetensors", model=again.model, step=again)
        from_file = state_of(again)
        again.model.load_state_dict(saved[done][1])
        again.load_state_dict(saved[done][0])
        assert same_state(state_of(again), from_file)
        run(again, items[done:])
        assert_same_run(again, straight)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "dtype", "weights"),
    [
        ("sgd", torch.float32, Weights.OWN),
        ("adamw", torch.bfloat16, Weights.MASTER),
        ("adamw8bit", torch.float32, Weights.OWN),
        ("adamw8bit", torch.bfloat16, Weights.OWN),
        ("adamw8bit", torch.bfloat16, Weights.MASTER),
        ("adamw8bit-dynamic", torch.bfloat16, Weights.REMAINDER),
        ("lion8bit", torch.bfloat16, Weights.STOCHASTIC),
        ("adamw-bf16", torch.float32, Weights.OWN),
    ],
)
def test_the_form_of_torch_keeps_every_dtype(name, dtype, weights, route, tmp_path):
    items = batches(5)
    straight = step_of(odd_model(dtype), OPTIMIZERS[name], weights)
    run(straight, items[:3])
    saved = route(straight.optimizer.state_dict(), tmp_path)
    again = resumed(straight, name, weights, dtype)
    again.optimizer.load_state_dict(saved)
    assert_same_run(again, straight)
    run(straight, items[3:])
    run(again, items[3:])
    assert_same_run(again, straight)


def test_what_is_loaded_is_a_copy():
    step = step_of(odd_model(), OPTIMIZERS["adamw8bit"])
    run(step, batches(1))
    saved = step.optimizer.state_dict()
    again = resumed(step, "adamw8bit", Weights.OWN, torch.float32)
    again.optimizer.load_state_dict(saved)
    before = state_of(step)
    run(again, batches(2))
    assert same_state(state_of(step), before)


class Turned(nn.Module):
    """The parameters of ``Odd`` made in another order, so that groups and positions differ."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.bias, self.vector, self.matrix, self.table = odd.bias, odd.vector, odd.matrix, odd.table
        self.forward_of = type(odd).forward

    def forward(self, ids):
        return self.forward_of(self, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_groups_in_another_order_are_matched_by_name(dtype):
    items = batches(5)
    groups = [{"params": ["bias"], "lr": 0.1}, {"params": ["matrix"], "lr": 0.003}]
    small = {"lr": 1e-2, "min_8bit_size": 64, "block": 64}
    straight = step_of(odd_model(dtype), optim.AdamW8bit(groups=groups, **small))
    run(straight, items[:3])
    model = odd_model(dtype)
    model.load_state_dict(straight.model.state_dict())
    again = step_of(Turned(model), optim.AdamW8bit(groups=groups[::-1], **small))
    again.optimizer.load_state_dict(straight.optimizer.state_dict())
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.003, 0.1, 1e-2]
    run(straight, items[3:])
    run(again, items[3:])
    mine, its = dict(again.model.named_parameters()), dict(straight.model.named_parameters())
    assert all(same_bits(mine[name].detach(), its[name].detach()) for name in its)


def test_a_state_by_position_loads_where_there_are_no_names():
    step = step_of(odd_model(), OPTIMIZERS["adamw8bit"])
    run(step, batches(2))
    saved = step.optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["param_names"]
    again = resumed(step, "adamw8bit", Weights.OWN, torch.float32)
    again.optimizer.load_state_dict(saved)
    assert_same_run(again, step)


@pytest.fixture(scope="module")
def trained():
    """An 8-bit step after two updates, only read by the tests."""
    step = step_of(odd_model(), OPTIMIZERS["adamw8bit"])
    run(step, batches(2))
    return step


def changed(saved, change):
    saved = copy.deepcopy(saved)
    change(saved["state"]["matrix"], saved)
    return saved


def drop(key):
    return lambda values, saved: values.pop(key)


def put(key, make):
    return lambda values, saved: values.update({key: make(values[key])})


def record(key, value):
    return lambda values, saved: saved["formats"]["matrix"].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("exp_avg_scale"), "codes exp_avg, but no exp_avg_scale"),
        (drop("exp_avg_sq"), "no exp_avg_sq"),
        (drop("step"), "no step count"),
        (
            put("exp_avg", lambda codes: codes.float()),
            r"exp_avg of 'matrix' is f32\[7,13\], this step keeps i8\[7,13\]",
        ),
        (put("exp_avg_sq", lambda codes: codes.to(torch.int8)), "this step keeps u8"),
        (put("exp_avg_scale", lambda scales: scales.bfloat16()), "exp_avg_scale of 'matrix' is bf16"),
        (put("exp_avg_scale", lambda scales: scales[:1]), "blocks of 64 elements need"),
        (put("exp_avg", lambda codes: codes.t()), r"has shape \[13, 7\]"),
        (record("map", "linear"), "map='linear', this step reads map='companded'"),
        (record("block", 32), "block=32, this step reads block=64"),
        (record("order", [1, 0]), "memory format"),
        (lambda values, saved: saved["formats"].pop("matrix"), "nothing says what they mean"),
        (lambda values, saved: saved.update(optimizer="AdamW"), "belongs to AdamW, but .*import_state"),
        (lambda values, saved: saved["state"].update(other=values), "'other'.* which the model does not have"),
        (put("step", lambda count: torch.tensor(-1.0)), "no step count 'step' from 0 on"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(trained, change, message):
    step = trained
    saved = changed(step.state_dict(), change)
    before, options = state_of(step), copy.deepcopy(step.optimizer.param_groups[0]["lr"])
    with pytest.raises(StateError, match=message):
        step.load_state_dict(saved)
    assert same_state(state_of(step), before)
    assert step.optimizer.param_groups[0]["lr"] == options and step.state.updates == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (optim.AdamW8bit(**{**SMALL, "block": 32}), "blocks of 32 elements need"),
        (optim.AdamW8bit(map="dynamic", **SMALL), "map='companded', this step reads map='dynamic'"),
        (optim.AdamW8bit(**{**SMALL, "min_8bit_size": 92}), "'matrix' is i8.* this step keeps f32"),
        (optim.AdamW8bit(min_8bit_size=64, block=64), "has 2 parameter groups, the step 1|divided in another way"),
        (optim.Adam8bit(**SMALL), "belongs to AdamW8bit, but .*Adam8bit"),
        (optim.AdamW(), "belongs to AdamW8bit"),
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_other_options_than_the_saved_are_refused(trained, other, message, native):
    step = trained
    again = step_of(odd_model(), other)
    with pytest.raises(StateError, match=message):
        if native:
            again.load_state_dict(step.state_dict())
        else:
            again.optimizer.load_state_dict(step.optimizer.state_dict())
    assert not again.optimizer.state


def test_a_state_without_its_master_copies_is_refused():
    step = step_of(odd_model(torch.bfloat16), OPTIMIZERS["adamw8bit"], Weights.MASTER)
    run(step, batches(1))
    plain = step_of(odd_model(torch.bfloat16), OPTIMIZERS["adamw8bit"])
    with pytest.raises(StateError, match=r"master, f32.* which this step does not keep"):
        plain.load_state_dict(step.state_dict())
    run(plain, batches(1))
    with pytest.raises(StateError, match="has no master"):
        step.load_state_dict(plain.state_dict())


def test_torchs_form_without_its_record_is_refused_for_codes(trained):
    saved = trained.optimizer.state_dict()
    del saved["graphopt"]
    with pytest.raises(StateError, match="nothing says what they mean"):
        trained.optimizer.load_state_dict(saved)


def test_names_that_do_not_match_are_listed(trained):
    step = trained
    saved = step.optimizer.state_dict()
    saved["param_groups"][0]["param_names"][0] = "module.vector"
    with pytest.raises(StateError, match=r"unknown \['module.vector'\], missing \['vector'\]"):
        step.optimizer.load_state_dict(saved)


def test_a_whole_steps_state_is_not_taken_for_an_optimizers(trained):
    with pytest.raises(StateError, match=r"step\.load_state_dict"):
        trained.optimizer.load_state_dict(trained.state_dict())


def test_torchs_sgd_loads_with_its_momentum_and_without():
    model = odd_model()
    for momentum in (0.9, 0.0):
        reference = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, dampening=0.5 if momentum else 0.0)
        model(**batches(1)[0])["loss"].backward()
        reference.step()
        twin = copy.deepcopy(model)
        step = step_of(twin, optim.SGD(lr=0.1, momentum=momentum, dampening=0.5 if momentum else 0.0))
        step.optimizer.load_state_dict(reference.state_dict())
        for batch in batches(2):
            reference.zero_grad()
            model(**batch)["loss"].backward()
            reference.step()
            step(**batch)
        for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)
        reference.zero_grad()


def test_codes_are_refused_after_the_memory_format_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    step = graphopt.compile(
        model,
        loss=lambda out, batch: out.square().mean(),
        outputs=["loss"],
        optimizer=optim.AdamW8bit(min_8bit_size=64),
    )
    step(torch.randn(2, 4, 5, 5))
    model.to(memory_format=torch.channels_last)
    with pytest.raises(StateError, match=r"strides \[36, 9, 3, 1\].*now needs \[36, 1, 12, 4\].*memory format"):
        step(torch.randn(2, 4, 5, 5))
    other = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    again = graphopt.compile(
        other,
        loss=lambda out, batch: out.square().mean(),
        outputs=["loss"],
        optimizer=optim.AdamW8bit(min_8bit_size=64),
    )
    with pytest.raises(StateError, match="memory format"):
        again.load_state_dict(step.state_dict())
