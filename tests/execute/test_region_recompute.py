"""Values that regions compute again: less is kept, nothing lives longer, nothing overwritten is read."""

from __future__ import annotations

import torch
from torch import nn

from graphopt.execute.lower_regions import lower_regions
from graphopt.execute.region_cuts import Owners, cut_spans
from graphopt.execute.region_reads import span_readers
from graphopt.execute.region_recompute import recompute_in_readers
from graphopt.ir import ops
from graphopt.ir.liveness import saved_bytes
from graphopt.ir.program import Program
from graphopt.optim import SGD
from tests.support.regions import InterpretedRegions, functional_step
from tests.support.steps import step_program


class Gated(nn.Module):
    """``tanh(x) * sigmoid(x)`` between two products: gradients read pointwise values of one saved product."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 4)
        self.dropout = dropout

    def forward(self, x):
        hidden = self.first(x)
        hidden = hidden.tanh() * hidden.sigmoid()
        if self.dropout:
            hidden = nn.functional.dropout(hidden, self.dropout)
        return {"loss": self.second(hidden).square().mean()}


def gated_program(**options) -> Program:
    torch.manual_seed(0)
    return functional_step(step_program(Gated(**options), {"x": torch.randn(128, 32)}, optimizer=SGD(lr=0.1)))


def recomputed(program: Program):
    owners = Owners(program)
    spans = cut_spans(program, owners)
    readers = span_readers(program, owners, spans)
    return spans, readers, recompute_in_readers(program, owners, spans, readers)


def test_keeps_the_product_instead_of_two_functions_of_it():
    program = gated_program()
    lowered = lower_regions(program, compile_region=InterpretedRegions()).program
    hidden_bytes = 128 * 64 * 4
    assert saved_bytes(program) - saved_bytes(lowered) >= hidden_bytes - 1024


def test_recomputes_pointwise_calls_and_never_draws():
    spans, _, found = recomputed(gated_program(dropout=0.5))
    calls = {node for nodes in found.by_span.values() for node in nodes}
    assert calls and all(ops.is_pointwise(node) and not ops.is_random(node) for node in calls)
    assert all(spans[number].is_region for number in found.by_span)


def test_nothing_lives_longer():
    _, readers, found = recomputed(gated_program())
    for node, before in readers.items():
        after = found.readers.get(node, set())
        is_resident = node.op in ("placeholder", "get_attr")
        assert is_resident or -1 in before or max(after, default=-1) <= max(before)


def test_reads_no_parameter_that_has_been_written_by_then():
    """``p * x`` could be made again from ``p``, but not in a region that runs after ``p`` was updated."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32))
            self.product = nn.Linear(32, 64)

        def forward(self, x):
            return {"loss": self.product(x * self.scale).square().mean()}

    program = functional_step(step_program(Scaled(), {"x": torch.randn(128, 32)}, optimizer=SGD(lr=0.1)))
    spans, _, found = recomputed(program)
    owners = Owners(program)
    position = {node: i for i, node in enumerate(program.ops())}
    updates = {
        output.name: value for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
    }
    scale = program.input_named("scale")
    for number, nodes in found.by_span.items():
        if any(scale in owners.bases_read(node) for node in nodes):
            assert position[spans[number].nodes[0]] <= position[updates["scale"]]


def test_a_normalised_row_is_made_again_from_the_input_that_its_gradient_reads():
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x):
            return {"loss": (self.second(self.norm(self.first(x))).tanh() + x.sum()).square().mean()}

    torch.manual_seed(0)
    batch = {"x": torch.randn(128, 32)}
    program = functional_step(step_program(Normalised(), batch, optimizer=SGD(lr=0.1)))
    _, _, found = recomputed(program)
    assert any(ops.is_normalised_row(node) for nodes in found.by_span.values() for node in nodes)
