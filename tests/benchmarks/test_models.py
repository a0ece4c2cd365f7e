"""The models that are measured have the size they are known for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS, model_named
from graphopt.errors import DataError, UnsupportedError

NUM_PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "llama-110m": 109_529_856,
    "llama-25m": 25_436_672,
    "bert-base": 109_483_778,
    "vit-b16": 86_567_656,
    "llama-d128": 2_230_400,
    "resnet50": 25_557_032,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_published_model_has_its_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].make_model(None)

    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]
    assert model.training


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny-")])
def test_tiny_model_has_the_outputs_it_is_asked_for(name: str) -> None:
    found = MODELS[name].make_model(None)(**MODELS[name].make_batch())

    assert all(output in found for output in MODELS[name].outputs)
    assert found["loss"].shape == ()


def test_layers_change_the_model_and_its_label() -> None:
    gpt2 = MODELS["tiny-gpt2"]

    assert len(gpt2.make_model(5).transformer.h) == 5
    assert (gpt2.label(None), gpt2.label(5)) == ("tiny-gpt2", "tiny-gpt2-layers5")


def test_refuses_layers_of_a_model_in_stages() -> None:
    with pytest.raises(UnsupportedError, match="leave --layers out"):
        MODELS["tiny-resnet"].make_model(3)


def test_unknown_model_lists_what_there_is() -> None:
    with pytest.raises(DataError, match="tiny-mlp"):
        model_named("gpt9")
