"""What a graph would get silently wrong is refused with the user's line and a way out."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.capture.capture_message import capture_message
from graphopt.errors import CaptureError, OutputError


class Model(nn.Module):
    """A linear layer; ``body`` makes the output from the model and the layer's result."""

    def __init__(self, body) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.body = body

    def forward(self, x):
        return {"loss": self.body(self, self.a(x)).sum()}


def refusal(body) -> str:
    torch.manual_seed(0)
    with pytest.raises(CaptureError) as caught:
        graphopt.compile(Model(body), outputs=["loss"])(torch.randn(2, 3))
    message = str(caught.value)
    assert "test_capture_refusals.py:" in message and "github" not in message
    return message


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_custom_autograd_function():
    apply = torch.autograd.Function.__dict__["apply"]
    message = refusal(lambda self, y: Doubled.apply(y))
    assert "'Doubled'" in message and "Doubled.apply(y)" in message and "detach()" in message
    assert torch.autograd.Function.__dict__["apply"] is apply


def test_reentrant_checkpoint():
    message = refusal(lambda self, y: checkpoint(torch.sin, y, use_reentrant=True))
    assert "use_reentrant=False" in message


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_tensor_hook_in_forward(name):
    method = getattr(torch.Tensor, name)

    def body(self, y):
        getattr(y if name == "register_hook" else self.a.weight, name)(lambda gradient: None)
        return y

    assert name in refusal(body)
    assert getattr(torch.Tensor, name) is method


def write_under_no_grad(self, y):
    with torch.no_grad():
        y.mul_(2)
    return y.square()


def write_a_view_under_no_grad(self, y):
    row = y[0]
    with torch.no_grad():
        row.mul_(2)
    return y.square()


def write_through_detach(self, y):
    y.detach().mul_(2)
    return y.square()


def write_detached_under_no_grad(self, y):
    with torch.no_grad():
        y.detach().zero_()
    return y.square()


@pytest.mark.parametrize(
    "body",
    [write_under_no_grad, write_a_view_under_no_grad, write_through_detach, write_detached_under_no_grad],
    ids=lambda body: body.__name__,
)
def test_writes_that_autograd_does_not_see(body):
    message = refusal(body)
    assert "no_grad" in message or "detach()" in message
    assert "not in place" in message


def test_batch_norm_with_cumulative_average():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(CaptureError, match=r"'1'.*momentum=None"):
        graphopt.compile(model)(torch.randn(4, 3))


def test_two_outputs_of_one_name():
    class Ambiguous(nn.Module):
        def forward(self, x):
            return {"a": {"b": x * 2}, "a.b": x * 3}

    with pytest.raises(OutputError, match=r"two outputs called 'a\.b'"):
        graphopt.compile(Ambiguous())(torch.randn(2))


@pytest.mark.parametrize("outputs", [None, ["loss"], ["loss", "logits"]])
def test_the_loss_function_wins_over_the_models_own_loss(outputs):
    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            logits = self.a(x)
            return {"loss": logits.sum(), "logits": logits}

    model, x = OwnLoss(), torch.randn(2, 3)
    out = graphopt.compile(model, outputs=outputs, loss=lambda out, batch: out.logits.square().mean())(x)
    assert torch.equal(out.loss, model(x)["logits"].square().mean())


def test_a_refused_line_is_all_that_is_seen(capfd, caplog):
    message = refusal(lambda self, y: y if y.sum() > 0 else -y)
    assert "torch.where" in message and capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_an_error_without_a_frame_of_the_user_shows_no_advice_to_report_it():
    refused = capture_message(RuntimeError("A fake tensor was found. Please file an issue on github. "))
    assert "A fake tensor was found." in refused and "github" not in refused and "unknown line" in refused


def test_the_line_is_taken_from_the_message_when_the_traceback_has_none():
    text = 'Could not guard\n  File "my/model.py", line 7, in forward\n    if x > 0:\n'
    assert "model.py:7: if x > 0:" in capture_message(RuntimeError(text))
