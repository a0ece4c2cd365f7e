"""Deliberately broken passes: each is caught at the level that can see it, and named by bisect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from graphopt.capture.differentiate import differentiate
from graphopt.errors import PassError
from graphopt.ir.numeric import random_inputs
from graphopt.ir.program import Program
from graphopt.passes.dedupe import Dedupe
from graphopt.passes.drop_dead import DropDead
from graphopt.pipeline.bisect import bisect
from graphopt.pipeline.pass_base import Changes, Numerics, Pass
from graphopt.pipeline.pipeline import Pipeline, Verify
from tests.support.graphs import program_of

aten = torch.ops.aten


@dataclass(frozen=True)
class DropLoss(Pass):
    """Returns one output less."""

    name: ClassVar[str] = "drop-loss"

    def apply(self, program: Program) -> Changes:
        program.set_outputs(program.output_values()[1:], program.signature.outputs[1:])
        return Changes(1)


@dataclass(frozen=True)
class HalveOutput(Pass):
    """Returns the first output in float16."""

    name: ClassVar[str] = "halve-output"

    def apply(self, program: Program) -> Changes:
        values = program.output_values()
        half = program.insert_before(program.output_node(), aten._to_copy.default, values[0], dtype=torch.float16)
        program.output_node().args = ((half, *values[1:]),)
        return Changes(1)


@dataclass(frozen=True)
class StaleValue(Pass):
    """Lets an operator compute in float64 and keeps the value it had before."""

    name: ClassVar[str] = "stale-value"

    def apply(self, program: Program) -> Changes:
        next(node for node in program.ops() if node.target is aten.sum.default).kwargs = {"dtype": torch.float64}
        return Changes(1)


@dataclass(frozen=True)
class HideChange(Pass):
    """Changes the program and says that it did not."""

    name: ClassVar[str] = "hide-change"

    def apply(self, program: Program) -> Changes:
        program.insert_before(program.output_node(), aten.neg.default, program.ops()[0])
        return Changes(0)


@dataclass(frozen=True)
class InventChange(Pass):
    """Says that it changed what it did not."""

    name: ClassVar[str] = "invent-change"

    def apply(self, program: Program) -> Changes:
        return Changes(3)


@dataclass(frozen=True)
class SwapSub(Pass):
    """Swaps the operands of every subtraction."""

    name: ClassVar[str] = "swap-sub"

    def apply(self, program: Program) -> Changes:
        subtractions = [node for node in program.ops() if node.target is aten.sub.Tensor]
        for node in subtractions:
            node.args = (node.args[1], node.args[0])
        return Changes(len(subtractions))


@dataclass(frozen=True)
class WriteInPlace(Pass):
    """Writes into its input without being declared as a pass that does."""

    name: ClassVar[str] = "write-in-place"

    def apply(self, program: Program) -> Changes:
        node = next(node for node in program.ops() if node.target is aten.sub.Tensor)
        program.insert_before(node.next, aten.neg_.default, node)
        return Changes(1)


@dataclass(frozen=True)
class ReturnNothing(Pass):
    """Forgets to say what it did."""

    name: ClassVar[str] = "return-nothing"

    def apply(self, program: Program) -> Changes:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class LeaveDangling(Pass):
    """Moves a node behind its user."""

    name: ClassVar[str] = "leave-dangling"

    def apply(self, program: Program) -> Changes:
        first = program.ops()[0]
        program.output_node().prepend(first)
        return Changes(1)


@dataclass(frozen=True)
class Raise(Pass):
    """Fails."""

    name: ClassVar[str] = "raise"

    def apply(self, program: Program) -> Changes:
        raise IndexError("out of nodes")


@dataclass(frozen=True)
class RoughSub(Pass):
    """Adds 1 % to every difference, which ``lossy`` may and ``exact`` may not."""

    name: ClassVar[str] = "rough-sub"

    def apply(self, program: Program) -> Changes:
        count = 0
        for node in program.ops():
            if node.target is aten.sub.Tensor:
                rough = program.insert_before(node.next, aten.mul.Tensor, node, 1.01)
                node.replace_all_uses_with(rough, delete_user_cb=lambda user, rough=rough: user is not rough)
                count += 1
        return Changes(count)


@dataclass(frozen=True)
class DeclaredRoughSub(RoughSub):
    """The same, declared."""

    name: ClassVar[str] = "declared-rough-sub"
    numerics: ClassVar[Numerics] = Numerics.LOSSY


BROKEN = [
    (DropLoss(), Verify.STRUCTURE, "outputs lost", ["0"]),
    (HalveOutput(), Verify.STRUCTURE, r"output '0' should be f32\[\], but .* is f16\[\]", ["0"]),
    (StaleValue(), Verify.INFER, r"recorded as f32\[\], but the operator gives f64\[\]", ["0"]),
    (HideChange(), Verify.STRUCTURE, "reports 0 changes, but the text is changed", []),
    (InventChange(), Verify.STRUCTURE, "reports 3 changes, but the text is unchanged", []),
    (SwapSub(), Verify.NUMERIC, "declares exact, but numbers differ", ["1", "0", "1"]),
    (WriteInPlace(), Verify.STRUCTURE, "in-place operator", ["1", "0", "1"]),
    (ReturnNothing(), Verify.STRUCTURE, "must return Changes, not NoneType", []),
    (LeaveDangling(), Verify.STRUCTURE, "malformed", []),
    (Raise(), Verify.STRUCTURE, "raised IndexError: out of nodes", []),
    (RoughSub(), Verify.NUMERIC, "declares exact, but numbers differ", ["0", "1", "0", "1"]),
]
NAMES = [case[0].name for case in BROKEN]
LEVELS = list(Verify)


def squared_distance() -> Program:
    """A joint program: outputs "0" (the loss) and "1" (the differences), gradients of inputs "0" and "1"."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        difference = x - y
        return (difference * difference).sum(), difference

    program = program_of(function, torch.randn(3, 4), torch.randn(3, 4))
    return differentiate(program, roots=["0"], wrt=["0", "1"])


@pytest.mark.parametrize(("item", "level", "message", "outputs"), BROKEN, ids=NAMES)
def test_is_caught_at_the_level_that_can_see_it(item: Pass, level: Verify, message: str, outputs: list[str]):
    program = squared_distance()
    text = program.text()
    with pytest.raises(PassError, match=message):
        Pipeline((DropDead(), item)).run(program, verify=level)
    assert program.text() == text


@pytest.mark.parametrize(("item", "level", "message", "outputs"), BROKEN, ids=NAMES)
def test_is_not_seen_below_that_level(item: Pass, level: Verify, message: str, outputs: list[str]):
    for lower in LEVELS[: LEVELS.index(level)]:
        Pipeline((item,)).run(squared_distance(), verify=lower)


@pytest.mark.parametrize(("item", "level", "message", "outputs"), BROKEN, ids=NAMES)
def test_is_named_by_bisect(item: Pass, level: Verify, message: str, outputs: list[str]):
    result = bisect(squared_distance(), Pipeline((DropDead(), Dedupe(), item, DropDead())))
    assert (result.broken, result.position, result.num_passes) == (item.name, 3, 4)
    assert [difference.output for difference in result.differences] == outputs
    assert str(result).startswith(f"{item.name} (pass 3 of 4) is the first that breaks: ")


def test_bisect_says_how_large_a_difference_is():
    program = squared_distance()
    result = bisect(program, Pipeline((SwapSub(),)), inputs=random_inputs(program))
    (difference, *_), x, y = result.differences, *random_inputs(program)[:2]
    assert difference.kind == "user"
    assert difference.max_abs == pytest.approx(float(2 * (x - y).abs().max()))


def test_bisect_finds_nothing_where_all_passes_hold():
    result = bisect(squared_distance(), Pipeline((DropDead(), Dedupe(), DeclaredRoughSub())))
    assert result.broken is None
    assert str(result) == "all 3 passes keep their contract and their declared numerics"


def test_bisect_blames_a_pass_only_for_its_own_change():
    result = bisect(squared_distance(), Pipeline((DeclaredRoughSub(), DropDead(), SwapSub())))
    assert result.broken == "swap-sub"
