"""The pipeline: order, what it refuses, what it records, and what a failing pass shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from graphopt.errors import PassError, PipelineError
from graphopt.ir.program import Program, Stage
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.passes.reuse_last_use import ReuseLastUse
from graphopt.pipeline.pass_base import Changes, Numerics, Pass, Refusal
from graphopt.pipeline.pipeline import PassEvent, Pipeline, Verify
from tests.support.graphs import program_of, targets

aten = torch.ops.aten


@dataclass(frozen=True)
class DoubleNegate(Pass):
    """Negate twice in front of every ``exp``: changes the text, not the numbers."""

    name: ClassVar[str] = "double-negate"
    after: ClassVar[tuple[str, ...]] = ("drop-dead",)

    times: int = 1
    scale: float = 1.0
    eager: bool = False
    where: str | None = None

    def apply(self, program: Program) -> Changes:
        count = 0
        for node in program.ops():
            argument = node.args[0]
            if (
                node.target is aten.exp.default
                and isinstance(argument, fx.Node)
                and argument.target is not aten.neg.default
            ):
                inner = program.insert_before(node, aten.neg.default, argument)
                node.args = (program.insert_before(node, aten.neg.default, inner),)
                count += 1
        return Changes(count, (Refusal("exp", "it is hot enough"),))


@dataclass(frozen=True)
class Deploy(DropDead):
    """A pass for inference."""

    name: ClassVar[str] = "deploy-only"
    numerics: ClassVar[Numerics] = Numerics.DEPLOY


@dataclass(frozen=True)
class OnStep(DropDead):
    """A pass for the step stage."""

    name: ClassVar[str] = "on-step"
    stage: ClassVar[Stage] = Stage.STEP


@dataclass(frozen=True)
class Failing(Pass):
    """Raises after it has changed the program."""

    name: ClassVar[str] = "failing"

    def apply(self, program: Program) -> Changes:
        program.insert_before(program.ops()[-1], aten.cos.default, program.ops()[0])
        raise KeyError("nothing there")


def exp_program() -> Program:
    return program_of(lambda x: (x + 1).exp(), torch.randn(3))


REGISTRY = {"double-negate": DoubleNegate, "drop-dead": DropDead, "failing": Failing}


def test_runs_passes_in_their_order_and_leaves_the_program_alone():
    program = exp_program()
    text = program.text()
    after = Pipeline((DropDead(), DoubleNegate(), Dedupe())).run(program, verify=Verify.NUMERIC)
    assert targets(after) == ["add", "neg", "neg", "exp"]
    assert program.text() == text


def test_records_what_each_pass_did():
    after = Pipeline((DropDead(), DoubleNegate())).run(exp_program())
    first, second = after.history
    assert [(first.position, first.name), (second.position, second.name)] == [(1, "drop-dead"), (2, "double-negate")]
    assert (second.changes, second.ops_before, second.ops_after) == (1, 2, 4)
    assert (second.stage, second.numerics) == ("forward", "exact")
    assert second.refusals == (Refusal("exp", "it is hot enough"),)
    assert (second.peak_bytes_before, second.peak_bytes_after) == (24, 24)


def test_shows_an_observer_the_program_before_and_after():
    events: list[PassEvent] = []
    Pipeline((DoubleNegate(),)).run(exp_program(), observer=events.append)
    assert targets(events[0].before) == ["add", "exp"]
    assert targets(events[0].after) == ["add", "neg", "neg", "exp"]
    assert events[0].record.name == "double-negate"


def test_refuses_a_pass_before_one_it_must_follow():
    with pytest.raises(PipelineError, match="double-negate must come after drop-dead"):
        Pipeline((DoubleNegate(), DropDead()))


def test_allows_a_pass_again_after_its_followers():
    assert len(Pipeline((DropDead(), DoubleNegate(), DropDead()))) == 3


def test_refuses_anything_behind_a_pass_that_writes_in_place():
    with pytest.raises(PipelineError, match="reuse-last-use writes in place and must be the last; drop-dead follows"):
        Pipeline((ReuseLastUse(), DropDead()))


def test_refuses_deploy_passes_in_training():
    with pytest.raises(PipelineError, match=r"deploy-only is deploy.*not allowed in training"):
        Pipeline((Deploy(),)).run(exp_program())


def test_runs_deploy_passes_when_asked_for():
    after = Pipeline((Deploy(),)).run(exp_program(), numerics=frozenset(Numerics))
    assert after.history[0].name == "deploy-only"


def test_refuses_a_pass_at_another_stage():
    with pytest.raises(PipelineError, match="on-step runs at stage step, but this program is at forward"):
        Pipeline((OnStep(),)).run(exp_program())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "drop-dead",
        "drop-dead,double-negate",
        "double-negate{times=3}",
        "drop-dead,double-negate{times=2,scale=0.5,eager=True,where=here},drop-dead",
    ],
)
def test_parse_is_the_inverse_of_str(text: str):
    pipeline = Pipeline.parse(text, registry=REGISTRY)
    assert str(pipeline) == text
    assert Pipeline.parse(str(pipeline), registry=REGISTRY) == pipeline


def test_parse_gives_options_their_types():
    (item,) = Pipeline.parse("double-negate{ times = 2, scale=1e-3, eager=true, where=None }", registry=REGISTRY)
    assert item == DoubleNegate(times=2, scale=1e-3, eager=True, where=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop-deed", "no pass is called 'drop-deed'; there are double-negate, drop-dead"),
        ("double-negate{speed=2}", "no option 'speed=2'; options are .*'times'"),
        ("drop-dead{a=1}", "options are none"),
        ("double-negate{times=many}", "times expects int, came 'many'"),
        ("double-negate{eager=perhaps}", "eager expects true or false, came 'perhaps'"),
        ("drop-dead{", "expected 'name' or"),
    ],
)
def test_parse_says_what_is_wrong(text: str, message: str):
    with pytest.raises(PipelineError, match=message):
        Pipeline.parse(text, registry=REGISTRY)


def test_parse_knows_the_passes_of_graphopt():
    assert Pipeline.parse("drop-dead,dedupe").passes == (DropDead(), Dedupe())


def test_a_failing_pass_shows_its_change_the_cause_and_how_to_reproduce_it():
    with pytest.raises(PassError) as caught:
        Pipeline((DropDead(), Failing())).run(exp_program())
    message = str(caught.value)
    assert "pass failing broke its contract: it raised KeyError: 'nothing there'" in message
    assert "+    cos_default: 'f32[3]' = aten.cos.default(add)" in message
    assert "graphopt bisect MODEL.py:make --outputs ... --passes 'failing'" in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_empty_pipeline_changes_nothing():
    program = exp_program()
    assert Pipeline(()).run(program) is program
