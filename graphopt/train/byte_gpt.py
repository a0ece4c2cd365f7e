"""A small language model over bytes, as one would write it in plain PyTorch: nothing in it knows of graphopt.

Shape suffixes: B batch, T time (bytes), D width, H heads, K width of a head, V vocabulary.
"""

# ruff: noqa: N803, N806 (shape suffixes are upper case)

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

NUM_BYTES = 256
_IGNORED_LABEL = -100
_INIT_STD = 0.02


@dataclass(frozen=True)
class ByteGPTConfig:
    """The size of a ByteGPT; the default has 0.8 million parameters."""

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_length: int = 128


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """x: f32[B,T,D] -> f32[B,T,D]."""
        split = (self.num_heads, x_BTD.shape[-1] // self.num_heads)
        query_BHTK, key_BHTK, value_BHTK = (
            part_BTD.unflatten(-1, split).transpose(1, 2) for part_BTD in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        mixed_BHTK = F.scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=True)
        return self.project(mixed_BHTK.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """x: f32[B,T,D] -> f32[B,T,D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.narrow(F.gelu(self.widen(self.feed_forward_norm(x_BTD))))


class ByteGPT(nn.Module):
    """A GPT whose tokens are bytes; the head is the embedding."""

    def __init__(self, config: ByteGPTConfig | None = None) -> None:
        super().__init__()
        self.config = config or ByteGPTConfig()
        width = self.config.width
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(self.config.max_length, width)
        self.blocks = nn.ModuleList(Block(width, self.config.num_heads) for _ in range(self.config.num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.apply(_initialise)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """``logits``: f32[B,T,V]; with ``labels`` also ``loss``, the mean cross-entropy in nats per byte.

        ids, labels: i64[B,T]; labels are the ids themselves: the shift by one is done here.
        """
        x_BTD = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if labels is None:
            return {"logits": logits_BTV}
        # Shifting the labels, not the logits, spares a copy of the logits.
        next_BT = F.pad(labels[:, 1:], (0, 1), value=_IGNORED_LABEL)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten(), ignore_index=_IGNORED_LABEL)
        return {"logits": logits_BTV, "loss": loss}

    @torch.no_grad()
    def generate(
        self, prompt: bytes, num_bytes: int, *, temperature: float = 0.5, generator: torch.Generator | None = None
    ) -> bytes:
        """``prompt`` (not empty) and ``num_bytes`` sampled bytes; the model's mode is as before afterwards."""
        if not prompt:
            raise ValueError("expected a prompt of at least one byte")
        was_training = self.training
        self.eval()
        device = self.embed.weight.device
        ids_BT = torch.tensor([list(prompt)], dtype=torch.int64)
        for _ in range(num_bytes):
            context_BT = ids_BT[:, -self.config.max_length :].to(device)
            logits_V = self(context_BT)["logits"][0, -1].float().cpu()
            chances_V = torch.softmax(logits_V / temperature, dim=-1)
            drawn_BT = torch.multinomial(chances_V, 1, generator=generator)[None]
            ids_BT = torch.cat([ids_BT, drawn_BT], dim=1)
        self.train(was_training)
        return bytes(ids_BT[0].tolist())


def _initialise(module: nn.Module) -> None:
    """GPT-2's: normal weights, zero biases."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
