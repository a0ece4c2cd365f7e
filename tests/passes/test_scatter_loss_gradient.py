"""scatter-loss-gradient: the gradient of a cross-entropy in the memory of its log-softmax."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import optim
from graphopt.build import training_program
from graphopt.passes.scatter_loss_gradient import ScatterLossGradient
from graphopt.pipeline.pipeline import Pipeline

ROWS, CLASSES, WIDTH = 64, 1000, 16
LOGITS_BYTES = ROWS * CLASSES * 4


class Head(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.options = options

    def forward(self, x, y):
        logits = self.linear(x)
        loss = F.cross_entropy(logits, y, **self.options)
        return {"loss": loss.mean() if self.options.get("reduction") == "none" else loss, "logits": logits}


def batch(ignored=(), *, ignore_index=-100):
    y = torch.randint(0, CLASSES, (ROWS,))
    y[list(ignored)] = ignore_index
    return {"x": torch.randn(ROWS, WIDTH), "y": y}


def joint(model, values=None):
    return graphopt.optimize(training_program(model, values or batch(), outputs=["loss", "logits"]), "fold-identities")


def run(program, **options):
    after = Pipeline((ScatterLossGradient(**options),)).run(program, verify="numeric")
    return after, after.history[-1]


WEIGHT = torch.linspace(0.1, 1.1, CLASSES)
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore-index": {"ignore_index": 3},
    "weight": {"weight": WEIGHT},
    "weight-sum": {"weight": WEIGHT, "reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_eager(options):
    torch.manual_seed(0)
    model = Head(**options)
    values = batch(ignored=(0, 5, 63), ignore_index=options.get("ignore_index", -100))
    model(**values)["loss"].backward()
    expected = [parameter.grad for parameter in model.parameters()]
    program = joint(model, values)
    after, record = run(program, min_logits_bytes=0)
    assert record.changes == ("label_smoothing" not in options)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **values}
    inputs = [tensors.get(entry.name, torch.ones(())) for entry in after.signature.inputs]
    found = [value for value, out in zip(after.run(inputs), after.signature.outputs, strict=True) if out.kind == "grad"]
    for mine, its in zip(found, expected, strict=True):
        # One rounding of g - p * s, in a sum over the rows.
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)


def test_every_label_ignored_gives_no_number_as_in_eager():
    model, values = Head(), batch(ignored=range(ROWS))
    step = graphopt.compile(model, ["loss", "logits"], optimizer=optim.SGD(lr=0.0), passes=[ScatterLossGradient(0)])
    assert step(**values).loss.isnan()


def test_small_logits_stay():
    _, record = run(joint(Head()))
    assert record.changes == 0 and "too few to matter" in record.refusals[0].reason


def test_a_second_run_changes_nothing():
    after, _ = run(joint(Head()), min_logits_bytes=0)
    assert run(after, min_logits_bytes=0)[1].changes == 0


def test_log_softmax_that_others_read_is_refused():
    class Two(Head):
        def forward(self, x, y):
            log_probs = F.log_softmax(self.linear(x), 1)
            entropy = (log_probs.exp() * log_probs).sum()
            return {"loss": F.nll_loss(log_probs, y) + entropy, "logits": log_probs}

    assert run(joint(Two()), min_logits_bytes=0)[1].changes == 0


def test_returned_logits_have_no_second_copy_beside_the_gradient():
    values = batch()
    peaks = []
    for passes in ((), (ScatterLossGradient(min_logits_bytes=0),)):
        step = graphopt.compile(
            Head(), ["loss", "logits"], optimizer=optim.SGD(lr=0.1), passes=passes or None, backend="aten"
        )
        step(**values)
        report = step.report(measure=True)
        assert 0 <= report.measured_peak_bytes - report.predicted_peak_bytes <= 16
        peaks.append(report.predicted_peak_bytes)
    assert peaks[1] < 2.3 * LOGITS_BYTES < 3 * LOGITS_BYTES < peaks[0]
