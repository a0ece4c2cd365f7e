"""What each policy drops, and what its arguments may be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphopt.checkpoint import (
    Combined,
    EveryN,
    Manual,
    Offload,
    Segments,
    SqrtN,
    ValueFacts,
    policy_of,
    policy_parts,
)
from graphopt.errors import UnsupportedError
from graphopt.planner.policies import policy_choice
from graphopt.planner.schedule import KEEP_ALL
from graphopt.planner.simulate import simulate
from tests.support.plans import Planned, planned_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(9))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


@pytest.fixture(scope="module")
def step() -> Planned:
    torch.manual_seed(0)
    return planned_step(Net(), {"x": torch.randn(64, 8)})


def dropped_names(step: Planned, *policies) -> set[str]:
    graph = step.graph
    return {graph.nodes[graph.value[s]].name for s in policy_choice(step.program, graph, policies).dropped}


def test_every_layer_keeps_its_input_and_drops_its_inside(step):
    dropped = dropped_names(step, EveryN(1))
    assert len([name for name in dropped if name.startswith("gelu")]) == 9
    inputs = {f"add_{n}" for n in range(1, 8)} | {"add"}  # of the second layer to the last
    assert inputs.isdisjoint(dropped)


def test_longer_pieces_drop_more(step):
    sizes = [len(dropped_names(step, EveryN(n))) for n in (1, 2, 3, 9)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert dropped_names(step, EveryN(9)) == dropped_names(step, EveryN(100)) == dropped_names(step, Segments(1))


def test_sqrt_is_as_many_pieces_as_a_piece_has_layers(step):
    assert dropped_names(step, SqrtN()) == dropped_names(step, Segments(3)) == dropped_names(step, EveryN(3))


def test_more_segments_than_layers_are_one_a_layer(step):
    assert dropped_names(step, Segments(40)) == dropped_names(step, EveryN(1))


def test_policies_add_up(step):
    both = dropped_names(step, Manual(["layers.0"]), Manual(["layers.1"]))
    assert both == dropped_names(step, Manual(["layers.0"])) | dropped_names(step, Manual(["layers.1"]))
    assert both == dropped_names(step, Manual(["layers.0", "layers.1"]))


def test_a_pattern_matches_within_paths(step):
    some, every = dropped_names(step, Manual(["layers.[0-3]"])), dropped_names(step, Manual(["layers.*"]))
    assert some < every


def test_a_predicate_sees_the_facts_of_each_value(step):
    seen: list[ValueFacts] = []

    def is_gelu(value: ValueFacts) -> bool:
        seen.append(value)
        return value.op == "aten.gelu.default"

    assert len(dropped_names(step, Manual(is_gelu))) == 9
    facts = next(value for value in seen if value.op == "aten.gelu.default")
    assert (facts.module, facts.spec, facts.nbytes) == ("layers.0.1", "f32[64,16]", 64 * 16 * 4)
    assert facts.source.startswith("test_policies.py:")


def test_each_policy_lowers_the_peak(step):
    everything = simulate(step.graph, KEEP_ALL).peak_bytes
    for policy in (EveryN(1), SqrtN(), Segments(4), Manual(["layers.*"])):
        assert simulate(step.graph, policy_choice(step.program, step.graph, [policy])).peak_bytes < everything


@pytest.mark.parametrize("which", ["layers.0", [], [1], ["a", None]])
def test_manual_expects_paths_or_a_predicate(which):
    with pytest.raises(UnsupportedError, match="Manual"):
        Manual(which)


def test_policies_are_values():
    assert SqrtN() == SqrtN() and EveryN(2) != EveryN(3)
    assert str(SqrtN() + Offload()).startswith("SqrtN() + Offload(")
    assert policy_of([SqrtN(), Offload()]) == SqrtN() + Offload()
    assert policy_of([SqrtN()]) == SqrtN() and policy_of(None) is None
    assert policy_parts(EveryN(2) + (SqrtN() + Offload())) == (EveryN(2), SqrtN(), Offload())


@pytest.mark.parametrize("checkpoint", [True, "sqrt", 3, [], ["sqrt"], [None]])
def test_what_is_no_policy_is_refused(checkpoint):
    with pytest.raises(UnsupportedError, match="checkpoint expects"):
        policy_of(checkpoint)


def test_one_offload_at_a_time():
    with pytest.raises(UnsupportedError, match="contradict"):
        Combined((Offload(), Offload()))
    with pytest.raises(UnsupportedError, match="prefetch"):
        Offload(prefetch=0)
