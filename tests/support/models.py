"""Tiny models of every kind the acceptance list names, each with a batch; random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 97
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class TinyModel:
    """A model in train mode, its batch, and the outputs to ask for."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    outputs: tuple[str, ...] = ("loss", "logits")


class Classifier(nn.Module):
    """A network with a cross-entropy on top; ``pick`` selects logits from what the network returns."""

    def __init__(self, network: nn.Module, pick: Callable[[Any], torch.Tensor] = lambda result: result) -> None:
        super().__init__()
        self.network = network
        self.pick = pick

    def forward(self, x, y):
        logits = self.pick(self.network(x))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, y)}


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 12))


def _language(model: nn.Module) -> TinyModel:
    ids = _ids()
    return TinyModel(model, {"input_ids": ids, "labels": ids.clone()})


def _classes(model: nn.Module, x: torch.Tensor, name: str = "x", target: str = "y") -> TinyModel:
    return TinyModel(model, {name: x, target: torch.randint(0, 3, (x.shape[0],))})


def _llama() -> TinyModel:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **LAYERS)
    return _language(transformers.LlamaForCausalLM(config))


def _qwen3() -> TinyModel:
    config = transformers.Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=8, **LAYERS)
    return _language(transformers.Qwen3ForCausalLM(config))


def _gpt2() -> TinyModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return _language(transformers.GPT2LMHeadModel(config))


def _bert() -> TinyModel:
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **LAYERS)
    )
    return _classes(model, _ids(), "input_ids", "labels")


def _t5() -> TinyModel:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return _language(transformers.T5ForConditionalGeneration(config))


def _vit() -> TinyModel:
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, **LAYERS)
    return _classes(transformers.ViTForImageClassification(config), torch.randn(2, 3, 32, 32), "pixel_values", "labels")


def _whisper() -> TinyModel:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=20,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return TinyModel(model, {"input_features": torch.randn(2, 8, 40), "labels": _ids()})


def _mixtral() -> TinyModel:
    config = transformers.MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, **LAYERS)
    return _language(transformers.MixtralForCausalLM(config))


def _mamba() -> TinyModel:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    return _language(transformers.MambaForCausalLM(config))


def _resnet() -> TinyModel:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    return _classes(model, torch.randn(2, 3, 32, 32), "pixel_values", "labels")


def _mlp() -> TinyModel:
    return _classes(Classifier(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))), torch.randn(4, 8))


def _cnn() -> TinyModel:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return _classes(Classifier(network), torch.randn(4, 3, 16, 16))


def _last_state(result: Any) -> torch.Tensor:
    return result[0][:, -1]


def _lstm() -> TinyModel:
    return _classes(Classifier(nn.LSTM(8, 3, 2, batch_first=True), _last_state), torch.randn(4, 5, 8))


def _gru_dropout() -> TinyModel:
    return _classes(Classifier(nn.GRU(8, 3, 2, batch_first=True, dropout=0.2), _last_state), torch.randn(4, 5, 8))


def _transformer_dropout() -> TinyModel:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return _classes(Classifier(nn.TransformerEncoder(layer, 2), lambda result: result[:, -1, :3]), torch.randn(4, 5, 8))


def _odd_dropouts() -> TinyModel:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Dropout2d(0.3),
        nn.ELU(),
        nn.AlphaDropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return _classes(Classifier(network), torch.randn(4, 3, 16, 16))


TINY_MODELS: dict[str, Callable[[], TinyModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "mixtral": _mixtral,
    "mamba": _mamba,
    "resnet": _resnet,
    "mlp": _mlp,
    "cnn": _cnn,
    "lstm": _lstm,
    "gru-dropout": _gru_dropout,
    "transformer-dropout": _transformer_dropout,
    "odd-dropouts": _odd_dropouts,
}


def tiny_model(name: str) -> TinyModel:
    """The model called ``name`` with weights and batch from seed 0, in train mode."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    tiny = TINY_MODELS[name]()
    tiny.model.train()
    return tiny
