"""Cutting a step into regions and putting it together again, with regions interpreted: no compiler is needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphopt.execute.executable import Executable, build_executable
from graphopt.execute.inductor import compile_regions
from graphopt.execute.lower_regions import lower_regions
from graphopt.execute.region_cuts import FEWEST_CALLS, Owners, cut_spans
from graphopt.execute.region_graph import region_graph
from graphopt.execute.segments import split_segments
from graphopt.ir import ops
from graphopt.ir.numeric import random_inputs
from graphopt.ir.program import Program
from graphopt.optim import SGD
from tests.support.models import tiny_model
from tests.support.regions import InterpretedRegions, functional_step, region_calls
from tests.support.steps import step_program, two_layers

# Scalars enter as tensors, so that one rounding may be another: a few units in the last place of the largest value.
TOLERANCE = 16 * torch.finfo(torch.float32).eps


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x), approximate="tanh")))


class Stack(nn.Module):
    """``blocks`` equal layers; every module path that matters ends in a number."""

    def __init__(self, num_layers: int, *, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width, dropout) for _ in range(num_layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": self.head(x).square().mean()}


def stack_program(num_layers: int, **options) -> Program:
    torch.manual_seed(0)
    return functional_step(
        step_program(Stack(num_layers, **options), {"x": torch.randn(64, 32)}, optimizer=SGD(lr=0.1))
    )


def run_with_seed(executable: Executable, inputs) -> tuple[list, list, torch.Tensor]:
    """Outputs, the inputs afterwards, and the generator's state afterwards."""
    own = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        outputs = executable.run(own)
        return outputs, own, torch.get_rng_state()


def assert_same_step(program: Program, lowered: Program) -> None:
    """Both leave the same numbers and the same generator behind."""
    inputs = random_inputs(program)
    expected, expected_inputs, expected_state = run_with_seed(build_executable(program, title="plain"), inputs)
    found, found_inputs, found_state = run_with_seed(build_executable(lowered, title="regions"), inputs)
    assert torch.equal(expected_state, found_state)
    for left, right in zip((*expected, *expected_inputs), (*found, *found_inputs), strict=True):
        if isinstance(left, torch.Tensor) and left.numel():
            scale = left.abs().max().clamp(min=1.0) if left.is_floating_point() else 0.0
            assert (left - right).abs().max() <= TOLERANCE * scale if left.dtype != torch.bool else left.equal(right)


def test_a_step_by_regions_is_the_same_step():
    program = functional_step(step_program(*two_layers()))
    lowered = lower_regions(program, compile_region=InterpretedRegions()).program
    assert len(region_calls(lowered)) >= 3
    assert_same_step(program, lowered)


@pytest.mark.parametrize("name", ["gpt2", "cnn", "odd-dropouts"])
def test_models_by_regions_are_the_same_step(name):
    tiny = tiny_model(name)
    program = functional_step(step_program(tiny.model, tiny.batch))
    assert_same_step(program, lower_regions(program, compile_region=InterpretedRegions()).program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "lstm", "gru-dropout", "transformer-dropout", "t5", "whisper", "mamba"]
)
def test_more_models_by_regions_are_the_same_step(name):
    tiny = tiny_model(name)
    program = functional_step(step_program(tiny.model, tiny.batch))
    assert_same_step(program, lower_regions(program, compile_region=InterpretedRegions()).program)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_equal_layers_are_one_region_whatever_their_number(dropout):
    counts = []
    for num_layers in (4, 8):
        regions = InterpretedRegions()
        lowered = lower_regions(stack_program(num_layers, dropout=dropout), compile_region=regions).program
        assert len(region_calls(lowered)) >= 3 * num_layers  # forward, backward and update of each layer
        counts.append(len(regions.made))
    assert counts[0] == counts[1] < 12


def test_no_region_crosses_the_borders_of_the_segments():
    program = stack_program(3)
    segments = {node: part.name for part in split_segments(program) for node in program.ops()[part.start : part.end]}
    for span in cut_spans(program, Owners(program)):
        assert len({segments[node] for node in span.nodes}) == 1
    lowered = lower_regions(program, compile_region=InterpretedRegions()).program
    assert [part.name for part in split_segments(lowered)] == [part.name for part in split_segments(program)]


def test_draws_stay_plain_calls_in_their_order_and_do_not_cut_a_layer():
    program = stack_program(2, dropout=0.2)
    spans = cut_spans(program, Owners(program))
    draws = [node for span in spans if not span.is_region for node in span.nodes if ops.is_random(node)]
    assert draws == [node for node in program.ops() if ops.is_random(node)] and len(draws) == 2
    assert not any(ops.is_random(node) for span in spans if span.is_region for node in span.nodes)
    assert any(len(span.nodes) > 2 * FEWEST_CALLS for span in spans if span.is_region)


def test_regions_write_the_parameters_they_update():
    program = stack_program(2)
    lowered = lower_regions(program, compile_region=InterpretedRegions()).program
    written = [node for call in lowered.ops() for node in ops.mutated_arguments(call)]
    assert {node.name for node in written} == {
        node.name for node in lowered.placeholders() if node.name.startswith("p_")
    }
    assert build_executable(lowered, title="x").plan.write_after == ((),) * len(lowered.ops())


def test_learning_rates_are_inputs_of_regions_and_not_part_of_them():
    program = stack_program(1)
    lowered = lower_regions(program, compile_region=InterpretedRegions()).program
    update = region_calls(lowered)[-1]
    assert "number" in update.text and "0.1" not in update.text


def test_values_are_read_from_the_plan_by_layout():
    """A region's results have the strides that the views behind them were captured for."""
    program = stack_program(2)
    owners = Owners(program)
    span = next(span for span in cut_spans(program, owners) if span.is_region)
    graph = region_graph(span, owners, needed=lambda value: True, updates={})
    inputs = [torch.randn(spec.shape).as_strided(spec.shape, spec.stride) for spec in graph.input_specs]
    results = graph.run(*inputs)
    assert tuple(result.stride() for result in results) == tuple(spec.stride for spec in graph.output_specs)


def test_regions_at_the_peak_are_cut_until_it_fits_or_none_is_left():
    program = stack_program(3)
    whole = compile_regions(program, most_bytes=1 << 40, compile_region=InterpretedRegions())
    cut = compile_regions(program, most_bytes=0, compile_region=InterpretedRegions())
    peaks = [build_executable(found.program, title="x").plan.peak_bytes for found in (whole, cut)]
    assert peaks[1] < peaks[0] and len(region_calls(cut.program)) > len(region_calls(whole.program))
    assert not any("cut" in note for note in whole.notes) and any("cut" in note for note in cut.notes)
    assert_same_step(program, cut.program)
