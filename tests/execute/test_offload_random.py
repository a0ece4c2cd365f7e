"""Random graphs, random decisions, random pace: equal numbers, the planned peak, the planned far memory."""

from __future__ import annotations

import random

import pytest
import torch

from graphopt.build import training_program
from graphopt.execute.cpu_copier import CopyPace
from graphopt.execute.executable import Executable, build_executable
from graphopt.ir.far_bytes import far_peak_bytes
from graphopt.ir.numeric import random_inputs
from graphopt.ir.offloadable import OffloadFacts
from graphopt.ir.program import Program, Stage
from graphopt.passes.offload import Offload
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pipeline import Pipeline
from graphopt.report.step_report import measure_executable
from tests.support.offload import decide_offload

SIDE = 6

# Without comparisons with numbers and powers: on a CPU both hold their number as a tensor of 12 bytes while they run,
# which the plan does not count, with offload or without it.
UNARY = (
    torch.sin,
    torch.tanh,
    torch.exp,
    lambda a: a.t(),
    lambda a: a.view(-1).view(SIDE, SIDE),
    lambda a: a.softmax(1),
    lambda a: torch.where(a.isfinite(), a, a * 0.5),
    lambda a: a[:, :1].expand(SIDE, SIDE),
    lambda a: torch.cat([a[1:], a[:1]]),
    lambda a: a.unflatten(1, (2, 3)).transpose(0, 1).reshape(SIDE, SIDE),
    lambda a: torch.stack(a.unbind(1)),
    lambda a: a.sort(1).values,
)
BINARY = (torch.mul, torch.add, torch.matmul, lambda a, b: a * b.t())


class RandomModel(torch.nn.Module):
    """Operators drawn from ``seed`` over all values made so far; the loss reads the last few."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.w = torch.nn.Parameter(torch.eye(SIDE) + 0.1)

    def forward(self, x):
        draw = random.Random(self.seed)
        values = [x @ self.w]
        for _ in range(14):
            if draw.random() < 0.6:
                values.append(draw.choice(UNARY)(draw.choice(values[-4:])).tanh())
            else:
                values.append(draw.choice(BINARY)(draw.choice(values), draw.choice(values[-3:])).tanh())
        return {"loss": torch.stack([(value * value).mean() for value in values[-3:]]).sum()}


def random_program(seed: int) -> Program:
    torch.manual_seed(seed)
    program = training_program(RandomModel(seed), torch.randn(SIDE, SIDE), outputs=["loss"])
    program.stage = Stage.STEP
    return program


def random_decisions(program: Program, draw: random.Random) -> Program:
    facts = OffloadFacts(program)
    names = [node.name for node in program.ops() if facts.objection(node) is None]
    return decide_offload(program, *draw.sample(names, draw.randint(1, len(names))))


def results(executable: Executable, inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return [value for value in executable.run(list(inputs)) if value is not None]


@pytest.mark.parametrize("seed", range(12))
def test_numbers_peak_and_far_memory_are_those_planned(seed):
    draw = random.Random(seed)
    plain = random_program(seed)
    inputs = random_inputs(plain, seed=seed)
    expected = results(build_executable(Pipeline((ReuseLastUse(),)).run(plain), title="plain"), inputs)
    pipeline = Pipeline((Offload(prefetch=draw.randint(0, 3)), ReuseLastUse()))
    program = pipeline.run(random_decisions(plain.copy(), draw), verify="numeric")
    executable = build_executable(program, title="offloaded")
    assert executable.offload is not None
    executable.offload.set_pace(CopyPace(random_seconds=0.003, seed=seed))
    for _ in range(3):
        actual = results(executable, inputs)
        assert len(actual) == len(expected)
        assert all(torch.equal(mine, its) for mine, its in zip(actual, expected, strict=True))
    assert executable.offload.statistics.far_peak_bytes == far_peak_bytes(program)
    assert measure_executable(executable).peak_bytes == executable.plan.peak_bytes
