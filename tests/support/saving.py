"""Models, states and comparisons for the tests of saving."""

from __future__ import annotations

import math
from pathlib import Path

import safetensors.torch
import torch
from torch import nn


class TiedLM(nn.Module):
    """Tied embedding and head, a parameter that is a view of another, a batch norm, a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight
        self.base = nn.Parameter(torch.randn(6, 4))
        self.rows = nn.Parameter(self.base.detach()[2:4])
        self.turned = nn.Parameter(self.base.detach().t())
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.arange(5.0), persistent=False)


class OnlyTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight


class FakeStep:
    """The part of a TrainStep that saving needs."""

    def __init__(self, state: dict | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def step_of(count: int) -> FakeStep:
    """A step whose every part says which step it is of."""
    moments = {"embed.weight": torch.full((11, 8), float(count)), "codes": torch.full((300,), count, dtype=torch.uint8)}
    return FakeStep({"optimizer": moments, "scaler": {"scale": 2.0**count}, "count": count})


def model_of(count: int) -> TiedLM:
    model = TiedLM()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(count)
    return model


def same_tree(first: object, second: object) -> bool:
    """Equal in type, structure and bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same_kind = first.dtype == second.dtype and first.shape == second.shape
        return same_kind and first.numpy().tobytes() == second.numpy().tobytes()
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(same_tree(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same_tree, first, second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return first == second


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {name: copy.contiguous() for name, copy in copies.items()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def half_writer(error: BaseException):
    """A save_file that is stopped by ``error`` after half of the bytes."""
    real = safetensors.torch.save_file

    def save_file(tensors, path, metadata=None):
        real(tensors, path, metadata=metadata)
        content = Path(path).read_bytes()
        Path(path).write_bytes(content[: len(content) // 2])
        raise error

    return save_file


def comparable(value):
    """``value`` with contiguous tensors in a dtype that numpy has."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous()
        return value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return {key: comparable(child) for key, child in value.items()}
    return type(value)(map(comparable, value)) if isinstance(value, (list, tuple)) else value
