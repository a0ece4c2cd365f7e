"""C27 and C28: what is not finite changes nothing and enters no history, which moves once a tensor and micro-step."""

from __future__ import annotations

import copy
import logging
from fractions import Fraction

import pytest
import torch
from torch import nn

import graphopt
from graphopt import LossScale, checkpoint, fp8, optim
from graphopt.errors import StateError
from graphopt.ir.decisions import Action
from graphopt.operators.fp8_history import history_scales
from tests.support.fp8_state import (
    RECIPES,
    batches,
    fp8_step,
    fresh_step,
    history_of,
    remembered,
    restart,
    spoiled,
    start_of,
)
from tests.support.scaling import same

DELAYED = RECIPES["delayed"]
STATIC = {decides: LossScale.static(64.0, decides=decides) for decides in ("host", "device")}
TENSORS = {
    "layers.0.input",
    "layers.0.weight",
    "layers.0.gradient",
    "layers.1.input",
    "layers.1.weight",
    "layers.1.gradient",
}


# ---- C27 ---------------------------------------------------------------------------------------------------------


def test_values_above_a_stale_scale_saturate_and_are_remembered():
    step = fresh_step(DELAYED)
    x = batches(1)[0]["x"]
    x = x / x.abs().max()
    step(x=x)
    step(x=10 * x)
    assert step.last_update.skipped is None and torch.isfinite(torch.tensor(step.last_update.loss))
    assert history_of(step)["layers.0.input"] == [10.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("recipe", "decides", "options"),
    [
        pytest.param("rowwise", "device", {}, marks=pytest.mark.slow),
        ("delayed", "host", {}),
        ("delayed", "device", {"clip_grad_norm": 1.0}),
        pytest.param("tensorwise", "host", {}, marks=pytest.mark.slow),
        pytest.param("blockwise", "host", {"clip_grad_norm": 1.0}, marks=pytest.mark.slow),
        pytest.param("delayed", "device", {}, marks=pytest.mark.slow),
        pytest.param("delayed", "host", {"release_gradients": False}, marks=pytest.mark.slow),
        pytest.param("delayed", "host", {"loss_scale": STATIC["host"]}, marks=pytest.mark.slow),
        pytest.param("delayed", "device", {"loss_scale": STATIC["device"]}, marks=pytest.mark.slow),
        pytest.param("delayed", "host", {"backend": "inductor"}, marks=pytest.mark.slow),
        pytest.param("delayed", "device", {"backend": "inductor"}, marks=pytest.mark.slow),
    ],
)
def test_bad_batches_leave_no_trace(recipe, decides, options):
    recipe = type(RECIPES[recipe])(**{**vars(RECIPES[recipe]), "decides": decides})
    good = batches(3)
    step = fresh_step(recipe, **options)
    start = start_of(step)
    for batch in good:
        step(**batch)
    clean = remembered(step)
    restart(step, start)
    for batch in (good[0], spoiled(good[0], float("inf")), good[1], spoiled(good[1], float("nan")), good[2]):
        step(**batch)
    assert same(remembered(step), clean)
    assert (step.state_dict()["counters"]["updates"], step.state_dict()["counters"]["skipped"]) == (3, 2)
    rows = history_of(step).values()
    assert all(torch.isfinite(torch.tensor(row)).all() for row in rows)


def test_the_first_batch_may_be_bad():
    step = fresh_step(DELAYED)
    before = remembered(step)
    step(**spoiled(batches(1)[0], float("inf")))
    assert all(same({"": value}, {"": remembered(step)[name]}) for name, value in before.items())
    assert all(not any(row) for row in history_of(step).values())
    assert "input of layers.0" in step.last_update.skipped


class Branches(nn.Module):
    """``poison`` multiplies what leaves ``second``: the gradient alone is not finite, behind a loss that is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, poison: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.second(torch.tanh(self.first(x)))
        # sqrt has the value 0 and an infinite slope at 0.
        return {"loss": (hidden * torch.sqrt(poison)).square().mean() + torch.sqrt(hidden * poison * 0).sum()}


def test_the_reason_names_the_tensors_in_the_order_of_the_step():
    step = fp8_step(RECIPES["tensorwise"], Branches())
    x = batches(1)[0]["x"]
    before = remembered(step)
    step(x=x, poison=torch.ones(()))
    assert step.last_update.skipped is not None and "gradient of second" in step.last_update.skipped
    assert "input" not in step.last_update.skipped
    assert all(same({"": value}, {"": remembered(step)[name]}) for name, value in before.items())


def test_gradients_wait_for_each_other_and_the_report_says_why():
    step = fresh_step(DELAYED)
    step(**batches(1)[0])
    (record,) = [record for record in step.program.history if record.name == "release-gradients"]
    assert record.refusals
    assert all(
        "the step is skipped if a quantized tensor or a gradient" in refusal.reason for refusal in record.refusals
    )


class FrozenBody(nn.Module):
    """The body is in FP8 and is not trained, the head is trained and not in FP8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.head(torch.tanh(self.body(x))) - y).square().mean()}


@pytest.mark.parametrize(
    ("decides", "options"), [("host", {}), ("device", {}), ("host", {"accumulate": 2}), ("host", {"clip_grad_norm": 1})]
)
def test_gradients_outside_fp8_skip_the_step_too(decides, options):
    recipe = fp8.Tensorwise(exclude=("head",), include=("body",), decides=decides)
    step = fp8_step(recipe, FrozenBody(), **options)
    good = {"x": batches(1)[0]["x"], "y": torch.zeros(16, 32)}
    step(**good)
    for _ in range(options.get("accumulate", 1) - 1):
        step(**good)
    assert step.last_update.skipped is None
    before = remembered(step)
    step(**{**good, "y": spoiled({"x": good["y"]}, float("nan"))["x"]})
    for _ in range(options.get("accumulate", 1) - 1):
        step(**good)
    assert same(before, remembered(step))
    expected = "the gradient norm is nan" if "clip_grad_norm" in options else "gradients are not finite: of head."
    assert step.last_update.skipped.startswith(expected)


def test_a_bad_micro_batch_drops_its_window_and_leaves_the_history():
    good = batches(4)
    step = fresh_step(DELAYED, accumulate=2)
    for batch in good[:2]:
        step(**batch)
    before = remembered(step)
    step(**spoiled(good[2], float("nan")))
    assert same(before, remembered(step))
    step(**good[2])
    assert "input of layers.0" in step.last_update.skipped and step.last_update.micro_batches == 2
    for name, value in step.model.named_parameters():
        assert torch.equal(before[name], value)
    for batch in good[2:]:
        step(**batch)
    assert step.last_update.skipped is None


def test_finite_values_of_any_size_are_no_reason_to_skip():
    step = fp8_step(DELAYED, Extremes())
    for size in (0.0, 1e-45, 1e-38, 1.0, 3e38, 1.0, 0.0):
        step(x=torch.full((16, 32), size))
        assert step.last_update.skipped is None, size


class Extremes(nn.Module):
    """A product of inputs of any size, whose loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.tanh(self.linear(x) / 1e38).float().mean()}


class Sliced(nn.Module):
    """One parameter that two products read a half of each, as the projections of attention do; one half is larger."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 32))
        with torch.no_grad():
            self.weight[32:] *= 1000

    def forward(self, x):
        halves = (nn.functional.linear(x, half) for half in (self.weight[:32], self.weight[32:]))
        return {"loss": sum(half.square().mean() for half in halves)}


def test_each_slice_of_a_value_has_a_scale_and_evidence_of_its_own():
    batch = batches(1)[0]
    expected, step = (fp8_step(RECIPES[name], Sliced()) for name in ("tensorwise", "delayed"))
    assert step(**batch).loss.item() == expected(**batch).loss.item()
    first, second = (history_of(step)[name][0] for name in ("weight", "weight#2"))
    assert second > 500 * first
    with torch.no_grad():
        step.model.weight[40, 20] = float("inf")
    assert not step(**batch).loss.isfinite()
    assert "weight#2" in step.last_update.skipped


def test_ten_in_a_row_are_warned_about(caplog):
    step = fresh_step(RECIPES["tensorwise"])
    bad = spoiled(batches(1)[0], float("nan"))
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        for _ in range(9):
            step(**bad)
        assert not caplog.records
        step(**bad)
    (record,) = caplog.records
    assert "10 updates in a row" in record.getMessage() and "input of layers.0" in record.getMessage()


# ---- C28 ---------------------------------------------------------------------------------------------------------


def trained(*, rows=16, accumulate=1, **options):
    """Losses, and the step, after 5 growing batches of ``rows`` with an evaluation between them."""
    step = fresh_step(DELAYED, accumulate=accumulate, **options)
    losses = []
    for batch in batches(5, rows=rows):
        for _ in range(accumulate):
            losses.append(step(**batch).loss.item())
        before = history_of(step)
        step.eval(**batch)
        assert history_of(step) == before
    return losses, remembered(step), step


@pytest.mark.parametrize(
    "policy",
    [
        {"checkpoint": checkpoint.EveryN(1)},
        pytest.param({"checkpoint": checkpoint.SqrtN()}, marks=pytest.mark.slow),
        pytest.param({"checkpoint": checkpoint.Offload(), "rows": 512}, marks=pytest.mark.slow),
        pytest.param({"memory": Fraction(97, 100), "rows": 512}, marks=pytest.mark.slow),
    ],
    ids=["every", "sqrt", "offload", "budget"],
)
def test_recompute_gives_the_same_bits_and_moves_the_history_once(policy):
    rows = policy.get("rows", 16)
    losses, plain, _ = trained(rows=rows)
    again, after, step = trained(**policy)
    assert losses == again
    assert any(row.action in (Action.RECOMPUTE, Action.OFFLOAD) for row in step.program.decisions.rows)
    assert same(plain, after)
    assert set(history_of(step)) == TENSORS
    largest = [batch["x"].to(torch.bfloat16).abs().max().item() for batch in batches(5, rows=rows)]
    assert history_of(step)["layers.0.input"] == largest[:0:-1]


@pytest.mark.slow
def test_the_history_moves_once_a_micro_batch_of_a_window():
    losses, plain, _ = trained(accumulate=2)
    again, after, step = trained(accumulate=2, checkpoint=checkpoint.EveryN(1))
    assert losses == again
    assert same(plain, after)
    largest = [batch["x"].to(torch.bfloat16).abs().max().item() for batch in batches(5)]
    assert history_of(step)["layers.0.input"] == [largest[4], largest[4], largest[3], largest[3]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 8.0), ({"algo": "most_recent"}, 1.0), ({"margin": 1}, 16.0), ({"power_of_two": True}, 8.0)],
)
def test_scales_follow_the_rule_of_the_recipe(options, expected):
    recipe = fp8.Delayed(history=3, **options)
    history = torch.tensor([[1.0, 8.0, 2.0], [0.0, 0.0, 0.0]])
    scales = history_scales(history, [448.0, 57344.0], recipe.margin, recipe.algo == "most_recent", recipe.power_of_two)
    wanted = torch.tensor(expected) / 448.0
    if recipe.power_of_two:
        wanted = torch.exp2(torch.log2(wanted).ceil())
    assert scales.tolist() == [wanted.item(), 0.0]


# ---- saving ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_saved_step_goes_on_with_the_same_bits(accumulate, tmp_path):
    step = fresh_step(DELAYED, accumulate=accumulate)
    inputs = batches(6)
    for batch in inputs[:3]:
        step(**batch)
    step.save(tmp_path / "step.safetensors")
    losses = [step(**batch).loss.item() for batch in inputs[3:]]
    expected = remembered(step)
    graphopt.load_checkpoint(tmp_path / "step.safetensors", model=step.model, step=step)
    assert [step(**batch).loss.item() for batch in inputs[3:]] == losses
    assert same(remembered(step), expected)


def test_a_history_of_another_length_keeps_the_latest_values():
    *_, step = trained()
    saved, row = step.state_dict(), history_of(step)["layers.0.input"]
    shorter, longer = fp8_step(fp8.Delayed(history=2)), fp8_step(fp8.Delayed(history=6))
    for other, expected in ((shorter, row[:2]), (longer, [*row, 0.0, 0.0])):
        other.load_state_dict(saved)
        assert history_of(other)["layers.0.input"] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fp8_state: fp8_state.pop("window"), "expected history, window"),
        (lambda fp8_state: fp8_state["history"]["values"].fill_(float("nan")), "Inf or NaN"),
        (lambda fp8_state: fp8_state["history"]["names"].pop(), "rows for the names"),
        (lambda fp8_state: fp8_state["history"].update(names=None), "a list of strings, came None"),
        (lambda fp8_state: fp8_state["window"].update(evidence="x"), "one float32 without dimensions, came 'x'"),
        (lambda fp8_state: fp8_state["window"].update(evidence=torch.zeros(3)), r"came torch.float32 \[3\]"),
        (lambda fp8_state: fp8_state.update(skipped_in_a_row=None), "from 0 on, came None"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, message):
    step = fresh_step(DELAYED)
    step(**batches(1)[0])
    saved, before = copy.deepcopy(step.state_dict()), remembered(step)
    saved["fp8"]["history"]["values"] += 1
    change(saved["fp8"])
    with pytest.raises(StateError, match=message):
        step.load_state_dict(saved)
    assert same(remembered(step), before)


@pytest.mark.slow
def test_batches_of_two_shapes_share_the_history():
    step = fresh_step(DELAYED)
    few, many = batches(2, rows=16), batches(3, rows=32)
    step(**few[0])
    step(**many[1])
    step(**few[1])
    largest = [few[1], many[1], few[0]]
    assert history_of(step)["layers.0.input"][:3] == [b["x"].to(torch.bfloat16).abs().max().item() for b in largest]


def test_an_update_with_8_bit_state_waits_for_the_evidence():
    step = fp8_step(RECIPES["tensorwise"], optimizer=optim.AdamW8bit(lr=0.1))
    step(**batches(1)[0])
    before = remembered(step)
    step(**spoiled(batches(1)[0], float("nan")))
    assert same(before, remembered(step)) and step.last_update.skipped
