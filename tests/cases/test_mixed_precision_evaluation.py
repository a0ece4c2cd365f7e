"""Mixed precision where nothing is trained."""

from __future__ import annotations

import copy

import torch

import graphopt
from tests.support.models import tiny_model

# Half of the distance of two neighbours in bfloat16, relative to them.
ROUNDING = 2.0**-9


def test_evaluation_is_lowered_too():
    tiny = tiny_model("gpt2")
    step = graphopt.compile(
        tiny.model.eval(), ["loss", "logits"], optimizer=graphopt.optim.SGD(lr=0.1), precision="bf16", backend="aten"
    )
    logits = step.eval(**tiny.batch).logits
    expected = copy.deepcopy(tiny.model)(**tiny.batch).logits
    assert logits.dtype is torch.float32 and not torch.equal(logits, expected)
    assert (logits - expected).abs().max() <= 10 * ROUNDING * expected.abs().max()
