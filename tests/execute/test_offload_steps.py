"""Steps and modules that offload: the same numbers at any pace of the copies, the planned peak, nothing left behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import OffloadError
from graphopt.execute.cpu_copier import CopyPace
from graphopt.execute.executable import build_executable
from graphopt.execute.far_memory import FarMemory
from graphopt.ir.numeric import random_inputs
from graphopt.ir.program import Stage
from graphopt.passes.offload import Offload
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline
from graphopt.report.step_report import measure_executable
from tests.support.models import tiny_model
from tests.support.offload import decide_offload, offload_all
from tests.support.steps import step_program

IRREGULAR = CopyPace(random_seconds=0.003)


class Blocks(nn.Module):
    """Residual blocks with dropout and a norm; the loss is a mean square."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return {"loss": x.square().mean()}


def blocks(seed: int = 0, **sizes: int) -> Blocks:
    torch.manual_seed(seed)
    return Blocks(**sizes)


def modules(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """The model compiled without and with offload, as two copies."""
    plain = graphopt.compile(copy.deepcopy(model), outputs=["loss"])
    return plain, graphopt.compile(model, outputs=["loss"], passes=offload_all(**options))


def backward(module: nn.Module, x: torch.Tensor, *, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = module(x).loss
    loss.backward()
    return loss.detach()


def engine_of(compiled):
    return compiled._ran().offload


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return found


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for mine, its in zip(left, right, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_losses_and_parameters_of_a_step_are_equal_bit_for_bit(prefetch):
    model = blocks()
    twin = copy.deepcopy(model)
    plain = graphopt.compile(twin, outputs=["loss"], optimizer=graphopt.optim.AdamW(), clip_grad_norm=0.1)
    step = graphopt.compile(
        model,
        outputs=["loss"],
        optimizer=graphopt.optim.AdamW(),
        clip_grad_norm=0.1,
        passes=offload_all(prefetch),
        verify="numeric",
    )
    losses = []
    for run in (plain, step):
        torch.manual_seed(1)
        losses.append([run(torch.randn(6, 16)).loss for _ in range(3)])
        if run is step:
            engine_of(step).set_pace(IRREGULAR)
            losses[-1] += [run(torch.randn(6, 16)).loss for _ in range(3)]
        else:
            losses[-1] += [run(torch.randn(6, 16)).loss for _ in range(3)]
    assert_equal(*losses)
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert engine_of(step).statistics.values_in > 20


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet", "transformer-dropout"])
def test_the_predicted_peak_is_the_measured_one(name):
    tiny = tiny_model(name)
    step = graphopt.compile(
        tiny.model, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1), passes=offload_all(), verify="infer"
    )
    step(**tiny.batch)
    record = next(item for item in step.program.history[::-1] if item.name == "offload")
    assert record.changes > 3 and record.saved_bytes_after < 0.7 * record.saved_bytes_before
    executable = step.last_executable
    for pace in (CopyPace(), IRREGULAR):
        executable.offload.set_pace(pace)
        assert measure_executable(executable).peak_bytes == executable.plan.peak_bytes
    assert executable.offload.statistics.far_bytes == 0


def test_the_peak_falls_by_what_is_gone():
    model = blocks(width=64, depth=8)
    plain, module = modules(model, prefetch=1)
    x = torch.randn(128, 64)
    backward(plain, x)
    backward(module, x)
    peaks = [compiled.report(measure=True).measured_peak_bytes for compiled in (plain, module)]
    assert peaks[1] < 0.5 * peaks[0]


def test_the_report_says_what_moved():
    _, module = modules(blocks())
    backward(module, torch.randn(6, 16))
    moved = engine_of(module).statistics
    assert moved.values_out == moved.values_in > 10 and moved.bytes_out == moved.bytes_in > 0
    text = str(module.report())
    assert f"note: offload: {moved.values_out} values (" in text and "in so far, waited " in text
    row = next(row for row in module.program.decisions.rows if row.action == "offload")
    assert any(node.name == row.value for node in module.program.ops())


def test_two_models_train_in_turns():
    pairs = [modules(blocks(seed)) for seed in (1, 2)]
    x = torch.randn(6, 16)
    for plain, module in pairs:
        backward(plain, x), backward(module, x)
        engine_of(module).set_pace(IRREGULAR)
        plain.zero_grad(), module.zero_grad()
    losses = [module(x + seed).loss for seed, (_, module) in enumerate(pairs)]
    del losses
    for side in (0, 1):
        torch.manual_seed(7)
        outputs = [pair[side](x + seed).loss for seed, pair in enumerate(pairs)]
        for loss in outputs:
            loss.backward()
    for plain, module in pairs:
        assert_equal(gradients(plain), gradients(module))


def test_a_module_runs_forward_twice_before_its_backwards():
    plain, module = modules(blocks())
    first, second = torch.randn(6, 16), torch.randn(6, 16)
    backward(plain, first), backward(module, first)
    engine_of(module).set_pace(IRREGULAR)
    found = []
    for compiled in (plain, module):
        compiled.zero_grad()
        torch.manual_seed(5)
        losses = [compiled(x).loss for x in (first, second)]
        losses[0].backward()
        found.append(gradients(compiled))
        losses[1].backward()
        found[-1] += gradients(compiled)
    assert_equal(*found)
    assert engine_of(module).statistics.far_bytes == 0


def test_a_forward_without_a_backward_leaves_nothing():
    _, module = modules(blocks())
    x = torch.randn(6, 16)
    backward(module, x)
    engine = engine_of(module)
    most = engine.statistics.far_peak_bytes
    for pace in (CopyPace(), IRREGULAR):
        engine.set_pace(pace)
        for _ in range(3):
            loss = module(x).loss
            assert engine.statistics.far_bytes == most
            del loss
            assert engine.statistics.far_bytes == 0
    assert engine.statistics.far_peak_bytes == most


def test_a_backward_can_run_twice():
    plain, module = modules(blocks())
    x = torch.randn(6, 16)
    backward(plain, x), backward(module, x)
    found = []
    for compiled in (plain, module):
        compiled.zero_grad()
        torch.manual_seed(5)
        loss = compiled(x).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(gradients(compiled))
    assert_equal(*found)
    del loss
    assert engine_of(module).statistics.far_bytes == 0


def test_a_step_that_fails_in_the_middle_gives_everything_back(monkeypatch):
    model = blocks()
    twin = copy.deepcopy(model)
    plain = graphopt.compile(twin, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    step = graphopt.compile(model, outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1), passes=offload_all())
    x = torch.randn(6, 16)
    for run in (plain, step):
        torch.manual_seed(1)
        run(x)
    engine = engine_of(step)
    engine.set_pace(IRREGULAR)
    copies = engine._copiers[torch.device("cpu")]
    wait_fetched, num_calls = copies.wait_fetched, []

    def fail_at_the_third(parcel, buffer):
        num_calls.append(1)
        if len(num_calls) == 3:
            raise KeyboardInterrupt
        wait_fetched(parcel, buffer)

    monkeypatch.setattr(copies, "wait_fetched", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        step(x)
    gc.collect()
    assert engine.statistics.far_bytes == 0
    for run in (plain, step):
        torch.manual_seed(2)
        run(x)
    assert_equal(list(model.parameters()), list(twin.parameters()))


def test_a_budget_that_does_not_hold_is_an_error_before_anything_is_written():
    model = blocks()
    batch = {"x": torch.randn(6, 16)}
    program = decide_offload(step_program(model, batch, optimizer=graphopt.optim.SGD(lr=0.1)))
    program = Pipeline((Offload(), *default_pipeline(Stage.STEP).passes[-1:])).run(program)
    inputs = random_inputs(program)
    before = [value.clone() for value in inputs if isinstance(value, torch.Tensor)]
    executable = build_executable(program, title="budget", far_memory=FarMemory(budget=1000))
    with torch.no_grad(), pytest.raises(OffloadError, match="raise host_budget, or offload less"):
        executable.run(inputs)
    assert_equal(before, [value for value in inputs if isinstance(value, torch.Tensor)])
    roomy = build_executable(program, title="budget", far_memory=FarMemory(budget=1 << 20))
    with torch.no_grad():
        roomy.run(inputs)
    assert 1000 < roomy.offload.statistics.far_peak_bytes <= 1 << 20


def test_accumulation_windows_offload_too():
    model = blocks()
    twin = copy.deepcopy(model)
    options = {"outputs": ["loss"], "optimizer": graphopt.optim.SGD(lr=0.1), "accumulate": 2}
    x = torch.randn(6, 16)
    for run in (graphopt.compile(twin, **options), graphopt.compile(model, passes=offload_all(), **options)):
        torch.manual_seed(1)
        for _ in range(4):
            run(x)
    assert_equal(list(model.parameters()), list(twin.parameters()))


def test_a_step_that_is_gone_takes_its_engine_along():
    step = graphopt.compile(blocks(), outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1), passes=offload_all())
    step(torch.randn(6, 16))
    is_alive = weakref.ref(engine_of(step))
    del step
    gc.collect()
    assert is_alive() is None


def test_what_does_not_offload_has_no_engine():
    step = graphopt.compile(blocks(), outputs=["loss"], optimizer=graphopt.optim.SGD(lr=0.1))
    step(torch.randn(6, 16))
    assert step.last_executable.offload is None
    assert "offload:" not in str(step.report())
