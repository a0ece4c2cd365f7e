"""The optimizer state in a report: a row for each parameter, bytes that add up, the state beside an open window."""

from __future__ import annotations

import pytest
import torch

import graphopt
from graphopt import optim
from graphopt.optim.state import Weights
from tests.support.eight_bit import OPTIMIZERS, batches, odd_model, run, step_of

BLOCKS_OF_MATRIX = 2  # 91 elements in blocks of 64
MATRIX_BYTES = 2 * (7 * 13 + 4 * BLOCKS_OF_MATRIX)


@pytest.fixture(scope="module")
def step():
    """An 8-bit step with a frozen parameter, after one update."""
    model = odd_model()
    model.bias.requires_grad_(False)
    step = step_of(model, OPTIMIZERS["adamw8bit"])
    run(step, batches(1))
    return step


def test_every_parameter_has_a_row_with_its_reason(step):
    rows = {row.parameter: (row.format, row.nbytes, row.reason) for row in step.report().state}
    assert rows == {
        "matrix": ("int8 by blocks of 64, companded", MATRIX_BYTES, "91 elements"),
        "vector": ("int8 by blocks of 64, companded", 2 * (300 + 4 * 5), "state='int8'"),
        "bias": ("none", 0, "frozen"),
        "table.weight": ("float32", 2 * 4 * 143, "an embedding table: updates of rare rows need more digits"),
    }


def test_rows_say_what_the_state_really_takes(step):
    report = step.report()
    held = {
        name: sum(value.nbytes for key, value in step.state.facade.state[p].items() if key != "step")
        for name, p in step.state.known.items()
        if p.requires_grad
    }
    assert {row.parameter: row.nbytes for row in report.state if row.nbytes} == held
    assert report.memory.optimizer_state == sum(held.values())


def test_text_page_and_explanation_show_the_state(step, tmp_path):
    report = step.report()
    text = " ".join(str(report).split())
    assert "state int8 by blocks of 64, companded: 2 parameters, 838 B" in text
    assert "an embedding table: updates of rare rows" in text
    assert "8-bit updates on the CPU: " in text
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count('<tr class="state"') == 4 and f'data-bytes="{MATRIX_BYTES}"' in page
    assert "  optimizer state: int8 by blocks of 64, companded, 198 B: 91 elements\n" in step.explain("matrix")
    assert "  optimizer state: none, 0 B: frozen" in step.explain("bias")


def test_weights_that_are_kept_exact_show():
    for weights, label in ((Weights.MASTER, "float32 master"), (Weights.REMAINDER, "16 more bits of the weight")):
        step = step_of(odd_model(torch.bfloat16), OPTIMIZERS["adamw8bit"], weights)
        run(step, batches(1))
        row = next(row for row in step.report().state if row.parameter == "matrix")
        assert row.format == f"int8 by blocks of 64, companded + {label}"
        assert row.nbytes == MATRIX_BYTES + 91 * (4 if weights is Weights.MASTER else 2)


def test_a_report_without_an_optimizer_or_before_training_has_no_rows():
    module = graphopt.compile(odd_model(), outputs=["loss"])
    module(**batches(1)[0])
    assert module.report().state == ()
    step = step_of(odd_model(), optim.AdamW())
    step.eval(**batches(1)[0])
    assert step.report().state == () and step.report().memory.optimizer_state == 0


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_memory_counts_the_state_that_the_update_of_a_window_uses(num_micro_batches):
    whole = step_of(odd_model(), OPTIMIZERS["adamw8bit"])
    run(whole, batches(1))
    step = step_of(odd_model(), OPTIMIZERS["adamw8bit"], accumulate=2)
    run(step, batches(num_micro_batches))
    state_bytes = sum(row.nbytes for row in step.report().state)
    report = step.report()
    totals = 2 * 8  # weight and loss of the window
    assert whole.report().memory.optimizer_state == state_bytes
    assert report.memory.optimizer_state == state_bytes + totals
    assert report.resident_bytes + report.predicted_peak_bytes == report.memory.total
    assert "state int8 by blocks of 64" in str(report)
