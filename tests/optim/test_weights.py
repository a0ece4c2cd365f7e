"""Parameters of two bytes an element: updates smaller than their last digit are not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt import optim
from graphopt.errors import UnsupportedError
from graphopt.execute.step import TrainStep

MASTERS = ("fp32", "stochastic", "remainder")


class OneWeight(nn.Module):
    """Loss w: its gradient is 1 wherever w is."""

    def __init__(self, dtype: torch.dtype, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.w * x).float().sum()}


def train(model: nn.Module, optimizer: optim.Optimizer, *, steps: int = 100, **options) -> TrainStep:
    step = graphopt.compile(model, ["loss"], optimizer=optimizer, backend="aten", **options)
    x = torch.ones_like(next(model.parameters())).detach()
    for _ in range(steps):
        step(x)
    return step


def test_without_a_master_a_small_update_is_lost_as_in_torch():
    model = OneWeight(torch.bfloat16)
    train(model, optim.SGD(lr=1e-3))
    assert model.w.item() == 1.0


@pytest.mark.parametrize("master", ("fp32", "remainder"))
def test_exact_masters_sum_up_small_updates(master):
    model = OneWeight(torch.bfloat16)
    train(model, optim.SGD(lr=1e-3), precision=graphopt.Precision("bf16", master=master))
    assert abs(model.w.item() - 0.9) <= 0.002  # half a digit of bfloat16 below 1 is 0.00195


def test_rounding_by_chance_is_right_on_average():
    model = OneWeight(torch.bfloat16, size=4096)
    train(model, optim.SGD(lr=1e-3), precision=graphopt.Precision("bf16", master="stochastic"))
    # Each of 100 updates rounds with a deviation of at most half a digit, 0.0039 / 2: sqrt(100) 0.002 / sqrt(4096).
    assert abs(model.w.float().mean().item() - 0.9) <= 5 * 0.02 / 64
    assert len(model.w.unique()) > 1


def test_a_half_model_trains_with_masters_by_default_under_fp16():
    model = OneWeight(torch.float16)
    step = train(model, optim.SGD(lr=1e-5), precision="fp16", loss_scale=1024.0)
    assert abs(model.w.item() - 0.999) <= 0.0005
    assert step.optimizer.state[model.w]["master"].dtype == torch.float32


@pytest.mark.parametrize("rule", (optim.SGD(lr=0.1, momentum=0.9), optim.AdamW(lr=0.01), optim.Lion(lr=0.01)))
def test_remainder_and_master_are_float32_training_bit_by_bit(rule):
    def weights(dtype: torch.dtype, **options) -> torch.Tensor:
        torch.manual_seed(0)
        model = OneWeight(dtype, size=300)
        train(model, rule, steps=7, **options)
        return model.w.detach().float()

    master = weights(torch.bfloat16, precision=graphopt.Precision("bf16", master="fp32"))
    remainder = weights(torch.bfloat16, precision=graphopt.Precision("bf16", master="remainder"))
    exact = weights(torch.float32)
    assert torch.equal(master, remainder)
    assert torch.equal(master, exact.bfloat16().float())


@pytest.mark.parametrize("master", MASTERS)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(master):
    def started() -> tuple[OneWeight, TrainStep]:
        model = OneWeight(torch.bfloat16, size=700)
        options = {"precision": graphopt.Precision("bf16", master=master)}
        return model, train(model, optim.AdamW8bit(lr=1e-3, state="int8"), steps=3, **options)

    whole, step = started()
    x = torch.ones(700, dtype=torch.bfloat16)
    state, weights = step.state_dict(), whole.state_dict()
    state = {**state, "state": {k: {n: v.clone() for n, v in s.items()} for k, s in state["state"].items()}}
    weights = {name: value.clone() for name, value in weights.items()}
    for _ in range(3):
        step(x)
    resumed, other = started()
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    for _ in range(3):
        other(x)
    assert torch.equal(whole.w, resumed.w)


def test_a_value_written_into_a_parameter_reaches_its_master():
    model = OneWeight(torch.bfloat16, size=5)
    step = train(model, optim.SGD(lr=1e-3), steps=3, precision="bf16")
    with torch.no_grad():
        model.w[2] = 4.0
    step(torch.ones(5, dtype=torch.bfloat16))
    master = step.optimizer.state[model.w]["master"]
    assert abs(master[2].item() - 3.999) < 1e-6
    assert abs(master[0].item() - 0.996) < 1e-6  # digits that bfloat16 does not have are kept where nobody wrote


def test_a_master_follows_a_parameter_that_is_replaced():
    model = OneWeight(torch.bfloat16, size=5)
    step = train(model, optim.SGD(lr=1e-3), steps=3, precision="bf16")
    model.load_state_dict({"w": torch.full((5,), 2.0, dtype=torch.bfloat16)}, assign=True)
    step(torch.ones(5, dtype=torch.bfloat16))
    assert (step.optimizer.state[model.w]["master"] - 1.999).abs().max() < 1e-6


@pytest.mark.parametrize("master", ("stochastic", "remainder"))
def test_what_only_bfloat16_can_do_is_refused_for_float16(master):
    with pytest.raises(UnsupportedError, match="master='fp32'"):
        train(OneWeight(torch.float16), optim.SGD(lr=1e-3), precision=graphopt.Precision("fp16", master=master))


@pytest.mark.parametrize("master", MASTERS)
def test_the_forward_part_never_writes_into_a_parameter_that_it_is_the_last_to_read(master):
    model = OneWeight(torch.bfloat16)
    step = train(model, optim.SGD(lr=1e-3), steps=1, precision=graphopt.Precision("bf16", master=master))
    assert "aten.mul_" not in step.source.split("def update")[0]
    assert "aten.mul_.Tensor(p_w" not in step.source


def test_a_skipped_update_leaves_a_parameter_with_a_master_as_it_was():
    model = OneWeight(torch.float16, size=3)
    step = graphopt.compile(
        model, ["loss"], optimizer=optim.SGD(lr=1e-3), precision="fp16", loss_scale=1024.0, backend="aten"
    )
    step(torch.tensor([1.0, float("inf"), 2.0], dtype=torch.float16))
    assert step.last_update.skipped
    assert torch.equal(model.w.detach(), torch.ones(3, dtype=torch.float16))
