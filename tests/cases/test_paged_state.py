"""Cases of paged optimizer state: bits, limits, checkpoints in both directions, failures, several steps."""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import StateError, UnsupportedError
from graphopt.execute.paging import page_memory
from tests.support.paging import (
    Tensors,
    assert_same_parameters,
    assert_same_state,
    compiled,
    in_small_ranges,
    pair,
)

X = [torch.tensor(0.5 + 0.1 * number) for number in range(8)]

RULES = {
    "sgd": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adamw": (optim.AdamW, {"weight_decay": 0.1}),
    "adamw, bf16 state": (optim.AdamW, {"state": "bf16"}),
    "lion": (optim.Lion, {"weight_decay": 0.1}),
    "adamw8bit": (optim.AdamW8bit, {"state": "int8", "weight_decay": 0.1}),
    "adam8bit, odd blocks": (optim.Adam8bit, {"state": "int8", "block": 96, "weight_decay": 0.1}),
    "lion8bit": (optim.Lion8bit, {"state": "int8"}),
}
# Below a range, exactly one, one block more, odd, many ranges; a matrix.
SHAPES = ((1,), (255,), (256,), (257,), (512,), (768 + 256,), (33, 77))


@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_same_bits_at_every_size(rule, clip, monkeypatch):
    in_small_ranges(monkeypatch)
    optimizer, options = RULES[rule]
    model = Tensors(*SHAPES)
    (plain, plain_step), (paged, step) = pair(
        model, optimizer, paging={}, step={"clip_grad_norm": clip}, lr=1e-2, **options
    )
    for number, x in enumerate(X[:3]):
        plain_step(x), step(x)
        assert_same_parameters(paged, plain, number)
    assert_same_state(step, plain_step)
    report = step.report(measure=True)
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    assert report.memory.optimizer_state == 0
    assert "held by the caller" in step.explain("tensors.6") and "gradient: none" not in step.explain("tensors.6")


@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.AdamW8bit])
def test_paging_on_a_machine_without_managed_memory_load_and_resume(optimizer, tmp_path, caplog):
    """C54."""
    model, limit = Tensors((4096,), (33,)), 1000
    kwargs = {"lr": 1e-2, "state": "fp32" if optimizer is optim.AdamW else "int8"}
    with caplog.at_level(logging.WARNING):
        (plain, plain_step), (paged, step) = pair(model, optimizer, paging={"page_limit": limit}, step={}, **kwargs)
        for number, x in enumerate(X[:3]):
            plain_step(x), step(x)
            assert_same_parameters(paged, plain, number)
            now = step.paging
            assert now.resident_bytes + now.kept_bytes <= limit < now.paged_bytes + now.kept_bytes
    assert len([record for record in caplog.records if "paged=True" in record.message]) == 1
    step.save(tmp_path / "paged")
    plain_step.save(tmp_path / "plain")
    others = {}
    for saved, is_paged in (("paged", False), ("plain", True), ("paged", True)):
        other = copy.deepcopy(model)
        paging = {"paged": True, "page_limit": limit} if is_paged else {}
        other_step = compiled(other, optimizer(**kwargs, **paging))
        graphopt.load_checkpoint(tmp_path / saved, model=other, step=other_step)
        if is_paged:
            assert other_step.paging.paged == ("tensors.0",) and other_step.paging.resident_bytes == 0
        others[other] = other_step
    for x in X[3:6]:
        plain_step(x), step(x)
        assert_same_parameters(paged, plain)
        for other, other_step in others.items():
            other_step(x)
            assert_same_parameters(other, plain)
    resumed = list(others.values())
    notes = " ".join(resumed[1].report().notes)
    assert "1 parameters in memory-mapped files (0 B of it in ordinary memory now)" in notes
    for other_step in resumed:
        assert_same_state(other_step, plain_step)


@pytest.mark.parametrize("weights", ["fp32", "remainder", "stochastic"])
@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.AdamW8bit])
def test_what_keeps_bf16_weights_exact_is_paged_too(optimizer, weights, monkeypatch):
    in_small_ranges(monkeypatch)
    model = Tensors((1000,), (5, 300), dtype=torch.bfloat16)
    precision = graphopt.Precision(compute="fp32", master=weights)
    kwargs = {"lr": 1e-2, **({} if optimizer is optim.AdamW else {"state": "int8"})}
    (plain, plain_step), (paged, step) = pair(model, optimizer, paging={}, step={"precision": precision}, **kwargs)
    for x in X[:3]:
        plain_step(x), step(x)
        assert_same_parameters(paged, plain)
    assert_same_state(step, plain_step)


@pytest.mark.parametrize("release", [True, False], ids=["released", "at the end"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_grad_norm": 0.5}, {"loss_scale": "dynamic"}], ids=str)
def test_works_with_all_that_an_update_works_with(options, release, monkeypatch):
    in_small_ranges(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 10))

    def loss(output, batch):
        return output.square().mean()

    step = {**options, "release_gradients": release, "loss": loss}
    (plain, plain_step), (paged, paged_step) = pair(
        model, optim.AdamW8bit, paging={}, step=step, lr=1e-2, min_8bit_size=300
    )
    for number in range(5):
        batch = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(number))
        plain_step(batch), paged_step(batch)
        assert_same_parameters(paged, plain, number)
    plain_step.flush(), paged_step.flush()
    assert_same_parameters(paged, plain)
    assert_same_state(paged_step, plain_step)
    dtypes = {name: values["exp_avg"].dtype for name, values in paged_step.state_dict()["state"].items()}
    assert dtypes["0.weight"] == torch.float32 and dtypes["1.weight"] == torch.int8


@pytest.mark.parametrize("limit", [0, 2100, "1MiB"])
def test_the_limit_goes_to_the_smallest_states_first(limit):
    model = Tensors((300,), (200,), (50,), (3, 100))
    (plain, plain_step), (paged, step) = pair(model, optim.AdamW, paging={"page_limit": limit}, step={}, lr=1e-2)
    for x in X[:3]:
        plain_step(x), step(x)
    assert_same_parameters(paged, plain)
    assert_same_state(step, plain_step)
    kept = {0: (), 2100: ("tensors.2", "tensors.1"), "1MiB": ("tensors.2", "tensors.1", "tensors.0", "tensors.3")}
    assert step.paging.kept == kept[limit]
    assert set(step.paging.paged) == {f"tensors.{number}" for number in range(4)} - set(kept[limit])
    plain_report, report = plain_step.report(), step.report()
    saved = plain_report.memory.optimizer_state - report.memory.optimizer_state
    assert saved == 8 * sum(parameter.numel() for parameter in model.parameters()) - step.paging.kept_bytes
    assert plain_report.resident_bytes - report.resident_bytes == saved


@pytest.mark.parametrize("limit", [-1, "many", True, 1.5])
def test_a_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(UnsupportedError, match="page_limit expects bytes"):
        optim.AdamW(lr=0.1, paged=True, page_limit=limit)


def test_layouts_that_differ_are_updated_in_the_memory_order_of_the_parameter(monkeypatch):
    in_small_ranges(monkeypatch)

    class Layouts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.image = nn.Parameter(torch.randn(8, 3, 7, 9).contiguous(memory_format=torch.channels_last))
            self.transposed = nn.Parameter(torch.randn(77, 33).t())
            self.scalar = nn.Parameter(torch.tensor(0.3))

        def forward(self, x):
            rows = self.transposed.t().contiguous()  # the gradient comes laid out as the other way round
            return {"loss": (self.image * x).sin().sum() + (rows * x).sin().square().sum() + (self.scalar * x).cos()}

    for optimizer, options in (RULES["adamw"], RULES["adamw8bit"]):
        (plain, plain_step), (paged, step) = pair(Layouts(), optimizer, paging={}, step={}, lr=1e-2, **options)
        for x in X[:3]:
            plain_step(x), step(x)
            assert_same_parameters(paged, plain)
        assert_same_state(step, plain_step)


def test_two_steps_alive_at_once_keep_apart(monkeypatch):
    in_small_ranges(monkeypatch)
    models = [Tensors((700,), (33,)) for _ in range(2)]
    twins = copy.deepcopy(models)
    steps = [compiled(model, optim.AdamW(lr=1e-2, paged=True)) for model in models]
    plain = [compiled(model, optim.AdamW(lr=1e-2)) for model in twins]
    for number in range(4):
        for index, (step, other) in enumerate(zip(steps, plain, strict=True)):
            x = X[(number * (index + 1)) % 8]
            step(x), other(x)
    for model, twin in zip(models, twins, strict=True):
        assert_same_parameters(model, twin)
    assert not torch.equal(models[0].tensors[0], models[1].tensors[0])


def test_state_loaded_through_the_torch_optimizer_is_paged_again():
    model = Tensors((300,), (50,))
    (plain, plain_step), (paged, step) = pair(model, optim.AdamW, paging={}, step={}, lr=1e-2)
    for x in X[:2]:
        plain_step(x), step(x)
    step.optimizer.load_state_dict(copy.deepcopy(plain_step.optimizer.state_dict()))
    pages = step.state.pager.store.pages_of("tensors.0")
    exp_avg = step.optimizer.state[paged.tensors[0]]["exp_avg"]
    assert exp_avg.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
    for x in X[2:4]:
        plain_step(x), step(x)
        assert_same_parameters(paged, plain)


def test_state_that_somebody_replaces_is_paged_at_the_next_step():
    model = Tensors((300,))
    (plain, plain_step), (paged, step) = pair(model, optim.AdamW, paging={}, step={}, lr=1e-2)
    plain_step(X[0]), step(X[0])
    for network, optimizer in ((plain, plain_step.optimizer), (paged, step.optimizer)):
        optimizer.state[network.tensors[0]]["exp_avg"] = torch.full((300,), 0.25)
    plain_step(X[1]), step(X[1])
    assert_same_parameters(paged, plain)
    assert_same_state(step, plain_step)


def test_a_thousand_steps_leave_no_handle_and_no_file(tmp_path):
    model = Tensors((33,))
    step = compiled(model, optim.AdamW(lr=1e-3, paged=True, page_dir=str(tmp_path)))
    step(X[0])
    handles = list(Path("/proc/self/fd").iterdir()) if sys.platform.startswith("linux") else []
    for _ in range(1000):
        step(X[0])
    if handles:
        assert len(list(Path("/proc/self/fd").iterdir())) <= len(handles)
    assert step.paging.bytes_in == 1001 * 33 * 8
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_stops_the_step_before_it_changes_anything(tmp_path, monkeypatch):
    model = Tensors((300,), (50,))
    before = copy.deepcopy(model.state_dict())
    step = compiled(model, optim.AdamW(lr=1e-2, paged=True, page_dir=str(tmp_path)))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(page_memory.os, "posix_fallocate", full)
        with pytest.raises(StateError, match=r"No space left on device.*page_dir="):
            step(X[0])
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    twin = Tensors((300,), (50,))
    twin_step = compiled(twin, optim.AdamW(lr=1e-2))
    step(X[0]), twin_step(X[0])
    assert_same_parameters(model, twin)


def test_a_disk_that_is_full_leaves_a_load_undone(monkeypatch):
    source = compiled(Tensors((300,), (50,)), optim.AdamW(lr=1e-2))
    source(X[0])
    step = compiled(Tensors((300,), (50,)), optim.AdamW(lr=1e-2, paged=True))
    calls = []

    def full_at_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return reserve(*arguments)

    reserve = os.posix_fallocate
    with monkeypatch.context() as patched:
        patched.setattr(page_memory.os, "posix_fallocate", full_at_the_second)
        with pytest.raises(StateError, match="No space left"):
            step.load_state_dict(source.state_dict())
    assert step.state_dict()["state"] == {}
    step.load_state_dict(source.state_dict())
    assert_same_state(step, source)


def test_a_copy_that_fails_marks_the_step_as_broken_and_a_load_repairs_it(monkeypatch):
    in_small_ranges(monkeypatch)
    (plain, plain_step), (paged, step) = pair(Tensors((1000,)), optim.AdamW, paging={}, step={}, lr=1e-2)
    plain_step(X[0]), step(X[0])
    saved_model, saved = copy.deepcopy(paged.state_dict()), copy.deepcopy(step.state_dict())
    copier = type(next(iter(step.state.pager.store._copiers.values())))
    sent = []

    def fails(self, parcel, value):
        sent.append(parcel)
        if len(sent) == 5:
            raise OSError("the disk is gone")
        send(self, parcel, value)

    send = copier.send
    with monkeypatch.context() as patched:
        patched.setattr(copier, "send", fails)
        with pytest.raises(StateError, match="the disk is gone"):
            step(X[1])
    with pytest.raises(StateError, match="load a saved model"):
        step(X[1])
    paged.load_state_dict(saved_model)
    step.load_state_dict(saved)
    plain_step(X[1]), step(X[1])
    assert_same_parameters(paged, plain)
    assert_same_state(step, plain_step)


def test_copies_and_pickles_of_a_step_are_refused():
    step = compiled(Tensors((300,)), optim.AdamW(lr=1e-2, paged=True))
    step(X[0])
    with pytest.raises(UnsupportedError, match="state_dict"):
        copy.deepcopy(step.state.pager.store)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_cannot_write_into_the_state_of_its_parent():
    step = compiled(Tensors((300,)), optim.AdamW(lr=1e-2, paged=True))
    step(X[0])
    before = copy.deepcopy(step.state_dict()["state"])
    child = os.fork()
    if child == 0:
        try:
            step(X[1])
        except StateError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    after = step.state_dict()["state"]
    assert all(torch.equal(after[name]["exp_avg"], values["exp_avg"]) for name, values in before.items())


def test_interrupts_leave_a_whole_number_of_steps(monkeypatch):
    in_small_ranges(monkeypatch)
    model = Tensors((2000,), (300,), (33,))
    reference = copy.deepcopy(model)
    reference_step = compiled(reference, optim.AdamW(lr=1e-2))
    history = [copy.deepcopy(reference.state_dict())]
    for _ in range(400):
        reference_step(X[0])
        history.append(copy.deepcopy(reference.state_dict()))
    step = compiled(model, optim.AdamW(lr=1e-2, paged=True))
    step(X[0])
    interrupted = 0
    for attempt in range(25):
        timer = threading.Timer(0.001 + 0.0004 * attempt, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while timer.is_alive() and step.state.updates < 390:
                step(X[0])
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        done = step.state.updates
        for name, value in model.state_dict().items():
            assert torch.equal(value, history[done][name]), (attempt, name)
        assert all(values["step"] == done for values in step.state_dict()["state"].values())
        if done >= 390:
            break
    assert interrupted >= 3


def test_an_optimizer_without_state_has_nothing_to_page():
    (plain, plain_step), (paged, step) = pair(Tensors((300,)), optim.SGD, paging={}, step={}, lr=0.1)
    plain_step(X[0]), step(X[0])
    assert_same_parameters(paged, plain)
    assert step.paging.paged == ()
