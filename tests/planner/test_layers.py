"""Layers are found from numbers in module paths, else from repetition; groups of them are balanced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphopt.checkpoint import EveryN, Segments, SqrtN
from graphopt.errors import UnsupportedError
from graphopt.planner.layers import Layer, balanced_groups, find_layers
from graphopt.planner.policies import policy_choice
from tests.support.models import tiny_model
from tests.support.plans import planned_step


class Loss(nn.Module):
    """A network with a mean square of its result as the loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        return {"loss": self.network(x).square().mean()}


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Tanh())


def layers_of(network: nn.Module) -> tuple[Layer, ...]:
    torch.manual_seed(0)
    step = planned_step(Loss(network), {"x": torch.randn(16, 8)})
    return find_layers(step.program, step.graph)


class Named(nn.Module):
    """Layers under names without numbers."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.order = names
        for name in names:
            self.add_module(name, Tail())

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x))).tanh()


class Twice(nn.Module):
    """One shared block, called as often as there are layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shared, self.count = Tail(), count

    def forward(self, x):
        for _ in range(self.count):
            x = self.shared(x)
        return x


@pytest.mark.parametrize("count", [6, 8])
def test_numbered_modules_are_layers(count):
    assert [layer.name for layer in layers_of(nn.Sequential(*(block() for _ in range(count))))] == [
        f"network.{n}" for n in range(count)
    ]


def test_few_stages_are_looked_into():
    """Two stages of three blocks, as in a ResNet: the blocks are the layers."""
    stages = nn.Sequential(*(nn.Sequential(*(Tail() for _ in range(3))) for _ in range(2)))
    assert len(layers_of(stages)) == 6


def test_a_flat_sequential_has_layers():
    assert len(layers_of(nn.Sequential(*(part for _ in range(4) for part in block())))) >= 4


def test_layers_without_numbers_are_found_by_repetition():
    assert len(layers_of(Named("stem", "body", "neck", "tail", "cap"))) == 5


@pytest.mark.parametrize("count", [4, 6])
def test_a_shared_module_is_found_by_its_repeated_calls(count):
    """Weights are transposed at the first call alone, so the first call may stand apart."""
    assert len(layers_of(Twice(count))) in (count - 1, count)


def test_layers_follow_one_another_without_gaps():
    layers = layers_of(Named("a", "b", "c", "d"))
    assert [layer.end for layer in layers[:-1]] == [layer.start for layer in layers[1:]]


@pytest.mark.parametrize(("name", "count"), [("gpt2", 2), ("llama", 2), ("bert", 2), ("vit", 2)])
def test_transformers_have_as_many_layers_as_their_configs_say(name, count):
    tiny = tiny_model(name)
    step = planned_step(tiny.model, tiny.batch)
    assert len(find_layers(step.program, step.graph)) == count


def test_a_model_that_does_not_repeat_itself_is_told_what_to_do():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(8, 3)

        def forward(self, x):
            return self.only(x).exp()

    step = planned_step(Loss(Once()), {"x": torch.randn(16, 8)})
    for policy in (EveryN(1), SqrtN(), Segments(3)):
        with pytest.raises(UnsupportedError, match="Manual"):
            policy_choice(step.program, step.graph, [policy])


@pytest.mark.parametrize("layers", range(1, 13))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_groups_differ_by_at_most_one(layers, count):
    parts = tuple(Layer(str(n), n, n + 1) for n in range(layers))
    groups = balanced_groups(parts, count)
    sizes = [group.end - group.start for group in groups]
    assert sum(sizes) == layers and len(groups) == min(count, layers)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_nine_layers_in_five_groups():
    parts = tuple(Layer(str(n), n, n + 1) for n in range(9))
    assert [group.end - group.start for group in balanced_groups(parts, 5)] == [2, 2, 2, 2, 1]
