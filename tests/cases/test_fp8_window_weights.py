"""Weights are quantized once for a window of micro-batches, bit-equal to quantizing them in each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fp8_state import RECIPES, batches, fp8_step, fresh_step, history_of, remembered, restart, start_of
from tests.support.scaling import same

DELAYED = RECIPES["delayed"]
QUANTIZERS = ("quantize_fp8", "quantize_fp8_both", "quantize_fp8_transposed", "quantize_fp8_delayed")


class CountQuantized(TorchDispatchMode):
    """How often quantize operators are called on parameters, by the storage they read."""

    def __init__(self, parameters) -> None:
        super().__init__()
        self.names = {value.untyped_storage().data_ptr(): name for name, value in parameters}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "graphopt" and func._schema.name.partition("::")[2] in QUANTIZERS:
            name = self.names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def run_each_time(monkeypatch):
    """Let micro-steps quantize weights themselves."""
    monkeypatch.setattr("graphopt.build.split_weights", lambda joint: None)


@pytest.mark.parametrize(
    ("recipe", "grids"),
    [
        ("delayed", 1),
        pytest.param("tensorwise", 1, marks=pytest.mark.slow),
        pytest.param("rowwise", 2, marks=pytest.mark.slow),
    ],
)
def test_weights_are_quantized_once_a_window_for_each_grid(recipe, grids):
    """The first layer has no input gradient, which is what reads the second grid."""
    step = fresh_step(RECIPES[recipe], accumulate=3)
    step(**batches(1)[0])
    step.flush()
    with CountQuantized(step.model.named_parameters()) as count:
        for batch in batches(4):
            step(**batch)
        assert count.counts == {"layers.0.weight": 2, "layers.1.weight": 2 * grids}
        step.flush()
    assert step.state.fp8.weights.nbytes == 0


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow), pytest.param("blockwise", marks=pytest.mark.slow)],
)
def test_a_window_is_bit_equal_to_quantizing_each_time(recipe, monkeypatch):
    def losses():
        step = fp8_step(RECIPES[recipe], accumulate=2)
        return [step(**batch).loss.item() for batch in batches(5)], remembered(step)

    once, state = losses()
    run_each_time(monkeypatch)
    each, expected = losses()
    assert once == each
    assert same(state, expected)


@pytest.mark.slow
def test_delayed_weights_enter_the_history_once_a_window(monkeypatch):
    """Reference: micro-steps that quantize weights each time, with the history set back within the window."""
    step = fp8_step(DELAYED, accumulate=2)
    losses = [step(**batch).loss.item() for batch in batches(6)]
    run_each_time(monkeypatch)
    reference = fp8_step(DELAYED, accumulate=2)
    expected: list[float] = []
    rows: dict[str, torch.Tensor] = {}
    for position, batch in enumerate(batches(6)):
        if position % 2:
            history = reference.state.fp8.history
            names = tuple(name for name in history.rows() if name.endswith("weight"))
            history.put(names, torch.stack([rows.get(name, torch.zeros(4)) for name in names]))
        rows = reference.state.fp8.history.rows()
        expected.append(reference(**batch).loss.item())
    assert losses == expected
    assert same(remembered(step), remembered(reference))
    assert history_of(step)["layers.0.weight"][3] == 0.0 != history_of(step)["layers.0.weight"][2]


def test_a_parameter_written_within_a_window_is_quantized_again():
    step = fresh_step(RECIPES["tensorwise"], accumulate=2)
    start = start_of(step)
    batch = batches(1)[0]
    losses = []
    for is_changed_before in (True, False):
        restart(step, start)
        if is_changed_before:
            _double(step)
            step(**batch)
        else:
            step(**batch)
            _double(step)
        losses.append(step(**batch).loss.item())
    assert losses[0] == losses[1]


class Masked(nn.Module):
    """A layer, and one whose weight is masked by a buffer that each forward doubles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.masked = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("mask", torch.eye(32))

    def forward(self, x):
        weight = self.masked.weight * self.mask
        self.mask.mul_(2)
        return {"loss": nn.functional.linear(torch.tanh(self.plain(x)), weight).square().mean()}


def test_a_weight_that_depends_on_a_buffer_is_seen_in_each_micro_batch():
    step = fp8_step(DELAYED, Masked(), accumulate=2)
    largest = step.model.masked.weight.diag().abs().max().item()
    for batch in batches(2):
        step(**batch)
    rows = history_of(step)
    assert rows["weight"] == [2 * largest, largest, 0.0, 0.0]
    assert [value > 0 for value in rows["plain.weight"]] == [True, False, False, False]


def _double(step) -> None:
    with torch.no_grad():
        step.model.layers[0].weight.mul_(2)


def test_a_window_that_is_saved_goes_on_with_its_weights():
    step = fresh_step(DELAYED, accumulate=3)
    inputs = batches(6)
    for batch in inputs[:5]:
        step(**batch)
    saved = start_of(step)
    losses, state = [step(**batch).loss.item() for batch in inputs[5:] + inputs[:2]], remembered(step)
    restart(step, saved)
    assert [step(**batch).loss.item() for batch in inputs[5:] + inputs[:2]] == losses
    assert same(remembered(step), state)


def test_a_micro_batch_that_fails_leaves_nothing_for_the_history(monkeypatch):
    step = fresh_step(DELAYED, accumulate=3)
    step(**batches(1)[0])
    step.flush()
    before = step.state.fp8.state_dict()

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("graphopt.execute.step.run_before_commit", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(**batches(1)[0])
    assert step.state.fp8.state_dict()["window"]["weights"]["names"] == before["window"]["weights"]["names"] == []


def test_held_weights_are_counted_in_the_plan_and_the_report():
    step = fresh_step(RECIPES["tensorwise"], accumulate=2)
    step(**batches(1)[0])
    held = step.state.fp8.weights.nbytes
    assert held == 2 * (32 * 32 + 4) + 2 * 4  # codes and scales, and a number of each that says whether it is finite
    assert step.report().memory.fp8_state == held + 4


@pytest.mark.slow
def test_batches_of_two_shapes_share_what_is_held():
    step = fp8_step(DELAYED, accumulate=2)
    step(**batches(1, rows=16)[0])
    held = step.state.fp8.weights.nbytes
    step(**batches(1, rows=32)[0])
    assert held and len(step.builder._weight_programs) == 1


def test_nothing_is_held_where_each_micro_batch_is_an_update():
    step = fresh_step(RECIPES["tensorwise"])
    step(**batches(1)[0])
    assert step.state.fp8.weights.nbytes == 0 and not step.builder._weight_programs
