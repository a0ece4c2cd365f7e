"""scatter-embedding-gradient: rows of a lookup are added to the other gradient of its table."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.ir.liveness import plan_memory
from graphopt.operators.embedding_rows import ADD_EMBEDDING_ROWS
from graphopt.options import Accumulate
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.passes.scatter_embedding_gradient import ScatterEmbeddingGradient
from graphopt.pipeline.pipeline import Pipeline
from tests.support.graphs import program_of, run_pass
from tests.support.steps import step_program

aten = torch.ops.aten
VOCABULARY, WIDTH = 64, 8
TABLE_BYTES = VOCABULARY * WIDTH * 4


class TiedModel(nn.Module):
    """An embedding that is the head too; ``lookups``: how often the table is looked up in."""

    def __init__(self, *, lookups=1, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.lookups = lookups

    def forward(self, ids):
        hidden = sum(self.embed(ids.roll(i, 1)) for i in range(self.lookups))
        logits = F.linear(self.body(hidden).tanh(), self.embed.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten())}


def tied_step(**options):
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, 9))
    return step_program(TiedModel(**options), {"ids": ids}, clip=False), ids


def counts(program):
    """How many lookups have a table of their own as gradient, and how many are added by rows."""
    called = [node.target for node in program.ops()]
    return called.count(aten.embedding_dense_backward.default), called.count(ADD_EMBEDDING_ROWS)


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_are_added_to_the_gradient_of_the_head(padding):
    program, _ = tied_step(padding_idx=padding)
    assert counts(program) == (1, 0)
    after, record = run_pass(ScatterEmbeddingGradient(), program)
    assert counts(after) == (0, 1) and record.changes == 1


def test_every_lookup_is_added():
    program, _ = tied_step(lookups=3)
    after, record = run_pass(ScatterEmbeddingGradient(), program)
    assert counts(after) == (0, 3) and record.changes == 3


def test_without_another_gradient_one_lookup_makes_the_table_for_the_others():
    def two_lookups(first, second, ids):
        tables = [aten.embedding_dense_backward(rows, ids, VOCABULARY, -1, False) for rows in (first, second)]
        return tables[0] + tables[1]

    rows, ids = torch.randn(5, WIDTH), torch.randint(0, VOCABULARY, (5,))
    after, _ = run_pass(ScatterEmbeddingGradient(), program_of(two_lookups, rows, rows + 1, ids))
    assert counts(after) == (1, 1)


@pytest.mark.parametrize(
    ("reason", "function"),
    [
        ("how often", lambda g, r, i: g + aten.embedding_dense_backward(r, i, VOCABULARY, -1, True)),
        ("factor", lambda g, r, i: torch.add(g, aten.embedding_dense_backward(r, i, VOCABULARY, -1, False), alpha=2)),
        ("the sum is", lambda g, r, i: g.bfloat16() + aten.embedding_dense_backward(r, i, VOCABULARY, -1, False)),
        ("the sum is", lambda g, r, i: g[:1] + aten.embedding_dense_backward(r, i, VOCABULARY, -1, False)),
        ("no other gradient", lambda g, r, i: 1.5 + aten.embedding_dense_backward(r, i, VOCABULARY, -1, False)),
        ("no other gradient", lambda g, r, i: (t := aten.embedding_dense_backward(r, i, VOCABULARY, -1, False)) + t),
    ],
)
def test_refuses_and_says_why(reason, function):
    inputs = (torch.randn(VOCABULARY, WIDTH), torch.randn(5, WIDTH), torch.randint(0, VOCABULARY, (5,)))
    _, record = run_pass(ScatterEmbeddingGradient(), program_of(function, *inputs))
    assert record.changes == 0 and any(reason in refusal.reason for refusal in record.refusals), record.refusals


@pytest.mark.parametrize("also", ["output", "other reader"])
def test_keeps_a_table_that_something_else_needs(also):
    def shared(gradient, rows, ids):
        table = aten.embedding_dense_backward(rows, ids, VOCABULARY, -1, False)
        return gradient + table, table if also == "output" else table.sum()

    inputs = (torch.randn(VOCABULARY, WIDTH), torch.randn(5, WIDTH), torch.randint(0, VOCABULARY, (5,)))
    _, record = run_pass(ScatterEmbeddingGradient(), program_of(shared, *inputs))
    assert record.changes == 0 and "as a whole" in record.refusals[0].reason


def test_keeps_a_table_that_is_no_larger_than_the_rows():
    def small(gradient, rows, ids):
        return gradient + aten.embedding_dense_backward(rows, ids, 5, -1, False)

    inputs = (torch.randn(5, WIDTH), torch.randn(5, WIDTH), torch.randint(0, 5, (5,)))
    _, record = run_pass(ScatterEmbeddingGradient(), program_of(small, *inputs))
    assert record.changes == 0 and "no larger" in record.refusals[0].reason


def test_leaves_a_lookup_in_lower_precision_alone():
    """Its rows are summed in that precision, which adding them to a float32 gradient would not do."""

    def converted(gradient, rows, ids):
        return gradient + aten.embedding_dense_backward(rows, ids, VOCABULARY, -1, False).float()

    inputs = (torch.randn(VOCABULARY, WIDTH), torch.randn(5, WIDTH).bfloat16(), torch.randint(0, VOCABULARY, (5,)))
    _, record = run_pass(ScatterEmbeddingGradient(), program_of(converted, *inputs))
    assert record.changes == 0


def test_leaves_sums_without_a_lookup_alone():
    _, record = run_pass(ScatterEmbeddingGradient(), program_of(lambda x, y: x + y, torch.randn(4), torch.randn(4)))
    assert record.changes == 0 and not record.refusals


def test_a_sum_at_its_peak_holds_one_table_less():
    def total(gradient, rows, ids):
        doubled = gradient * 2  # its memory takes the result
        return (doubled + aten.embedding_dense_backward(rows, ids, VOCABULARY, -1, False)).sum()

    inputs = (torch.randn(VOCABULARY, WIDTH), torch.randn(5, WIDTH), torch.randint(0, VOCABULARY, (5,)))
    program = program_of(total, *inputs)
    peaks = [
        plan_memory(Pipeline((*passes, ReuseLastUse())).run(program)).peak_bytes
        for passes in ((), (ScatterEmbeddingGradient(),))
    ]
    assert peaks == [2 * TABLE_BYTES, TABLE_BYTES + 4]


def test_training_is_eagers_bit_by_bit():
    torch.manual_seed(0)
    model = TiedModel(lookups=2, padding_idx=3)
    twin, ids = copy.deepcopy(model), torch.randint(0, VOCABULARY, (2, 9))
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        step(ids=ids)
        reference.zero_grad()
        twin(ids)["loss"].backward()
        reference.step()
    assert any(r.name == "scatter-embedding-gradient" and r.changes == 2 for r in step.report().records)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_a_window_takes_rows_in_the_place_of_a_table():
    torch.manual_seed(0)
    embed = nn.Embedding(VOCABULARY, WIDTH)

    def loss(output, batch):
        return output.square().sum()

    step = graphopt.compile(
        embed,
        outputs=["loss"],
        loss=loss,
        optimizer=graphopt.optim.SGD(lr=0.1),
        accumulate=Accumulate(2, reduction="sum"),
    )
    step(torch.randint(0, VOCABULARY, (5,)))
    assert any(r.name == "scatter-embedding-gradient" and r.changes == 1 for r in step.report().records)
