"""The models that are measured, by name: random weights, one batch each, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphopt.errors import DataError, UnsupportedError

Batch = dict[str, torch.Tensor]

_BATCH_SEED = 0
_NUM_IMAGE_CLASSES = 1000
# A byte is a token: the parameters are those of the layers, as in design/DESIGN.md's 8-layer Llama.
_BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class BenchmarkModel:
    """A model to measure. ``make_model(layers)`` (None: as published) draws its weights from torch's generator;
    ``make_batch()`` is the same batch at every call; ``outputs``: what the training step is asked for.
    """

    name: str
    make_model: Callable[[int | None], nn.Module]
    make_batch: Callable[[], Batch]
    outputs: tuple[str, ...] = ("loss",)

    def label(self, layers: int | None) -> str:
        """The name that rows and files carry: with another number of layers it is another model."""
        return self.name if layers is None else f"{self.name}-layers{layers}"


@dataclass(frozen=True)
class TransformersModel:
    """Makes a transformers model from its config. ``layers_option``: the config's name for the number of layers."""

    architecture: str
    layers_option: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, layers: int | None = None) -> nn.Module:
        """The model in train mode, weights from torch's generator."""
        import transformers

        options = dict(self.options)
        if layers is not None:
            if self.layers_option is None:
                raise UnsupportedError(f"{self.architecture} has stages, not a number of layers: leave --layers out")
            options[self.layers_option] = layers
        architecture = getattr(transformers, self.architecture)
        model: nn.Module = architecture(architecture.config_class(**options))
        return model.train()


@dataclass(frozen=True)
class TokenBatch:
    """``input_ids`` [batch, length], and as labels the same tokens, or one of ``num_classes`` for each row."""

    batch: int
    length: int
    vocabulary: int
    num_classes: int | None = None

    def __call__(self) -> Batch:
        """The batch."""
        generator = torch.Generator().manual_seed(_BATCH_SEED)
        tokens = torch.randint(0, self.vocabulary, (self.batch, self.length), generator=generator)
        if self.num_classes is None:
            return {"input_ids": tokens, "labels": tokens}
        return {"input_ids": tokens, "labels": torch.randint(0, self.num_classes, (self.batch,), generator=generator)}


@dataclass(frozen=True)
class ImageBatch:
    """``pixel_values`` [batch, 3, size, size] and one of ``num_classes`` labels each."""

    batch: int
    size: int
    num_classes: int = _NUM_IMAGE_CLASSES

    def __call__(self) -> Batch:
        """The batch."""
        generator = torch.Generator().manual_seed(_BATCH_SEED)
        pixels = torch.randn(self.batch, 3, self.size, self.size, generator=generator)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(0, self.num_classes, (self.batch,), generator=generator),
        }


class Perceptron(nn.Module):
    """``num_layers`` linear layers with GELU and a cross-entropy loss; inputs are looked up, as the batch is tokens."""

    def __init__(self, num_layers: int, *, vocabulary: int = 64, width: int = 64, num_classes: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, num_classes)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """``logits`` [batch, classes] of the mean over the tokens, and ``loss``."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = nn.functional.gelu(layer(hidden))
        logits = self.head(hidden.mean(dim=1))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def make_perceptron(layers: int | None = None) -> nn.Module:
    """A Perceptron of 3 layers, or ``layers``."""
    return Perceptron(3 if layers is None else layers)


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_GPT2 = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_TINY_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 8}

_LLAMA_110M = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    # With 4 key and value heads it would be 100 M parameters.
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "tie_word_embeddings": True,
}
_LLAMA_25M = {
    "vocab_size": _BYTE_VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}
# The model of the anchor figures in benchmarks/facts_llama.py: 2,230,400 parameters, at 24 layers 6,428,800.
_LLAMA_D128 = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}

_ALL = (
    BenchmarkModel("tiny-mlp", make_perceptron, TokenBatch(4, 32, 64, num_classes=8)),
    BenchmarkModel("tiny-gpt2", TransformersModel("GPT2LMHeadModel", "n_layer", _TINY_GPT2), TokenBatch(2, 32, 128)),
    BenchmarkModel(
        "tiny-llama",
        TransformersModel(
            "LlamaForCausalLM", "num_hidden_layers", {**_TINY, "vocab_size": 128, "num_key_value_heads": 2}
        ),
        TokenBatch(2, 32, 128),
    ),
    BenchmarkModel(
        "tiny-bert",
        TransformersModel("BertForSequenceClassification", "num_hidden_layers", {**_TINY, "vocab_size": 128}),
        TokenBatch(2, 32, 128, num_classes=2),
    ),
    BenchmarkModel(
        "tiny-vit",
        TransformersModel(
            "ViTForImageClassification",
            "num_hidden_layers",
            {**_TINY, "image_size": 32, "patch_size": 8, "num_labels": 8},
        ),
        ImageBatch(2, 32, num_classes=8),
    ),
    BenchmarkModel(
        "tiny-resnet",
        TransformersModel("ResNetForImageClassification", None, _TINY_RESNET),
        ImageBatch(2, 32, num_classes=8),
    ),
    BenchmarkModel(
        "llama-d128",
        TransformersModel("LlamaForCausalLM", "num_hidden_layers", _LLAMA_D128),
        TokenBatch(4, 128, 512),
    ),
    BenchmarkModel("gpt2-124m", TransformersModel("GPT2LMHeadModel", "n_layer"), TokenBatch(2, 512, 50257)),
    BenchmarkModel(
        "llama-110m",
        TransformersModel("LlamaForCausalLM", "num_hidden_layers", _LLAMA_110M),
        TokenBatch(2, 512, 32000),
    ),
    BenchmarkModel(
        "llama-25m",
        TransformersModel("LlamaForCausalLM", "num_hidden_layers", _LLAMA_25M),
        TokenBatch(4, 512, _BYTE_VOCABULARY),
    ),
    BenchmarkModel(
        "bert-base",
        TransformersModel("BertForSequenceClassification", "num_hidden_layers"),
        TokenBatch(4, 256, 30522, num_classes=2),
    ),
    BenchmarkModel(
        "vit-b16",
        TransformersModel("ViTForImageClassification", "num_hidden_layers", {"num_labels": _NUM_IMAGE_CLASSES}),
        ImageBatch(4, 224),
    ),
    BenchmarkModel(
        "resnet50",
        TransformersModel("ResNetForImageClassification", None, {"num_labels": _NUM_IMAGE_CLASSES}),
        ImageBatch(4, 224),
    ),
)

MODELS: dict[str, BenchmarkModel] = {model.name: model for model in _ALL}


def model_named(name: str) -> BenchmarkModel:
    """The BenchmarkModel called ``name``; DataError lists what there is."""
    if name not in MODELS:
        raise DataError(f"there is no model {name!r} to measure; choose one of {', '.join(MODELS)}")
    return MODELS[name]
