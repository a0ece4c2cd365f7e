"""Memory that parameters share with other tensors, of which a graph knows nothing: to it, each input is its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from graphopt.capture.batch import BoundBatch
from graphopt.execute.model_view import ModelView


def overlapping_tensors(view: ModelView) -> tuple[str, ...]:
    """Names of trainable parameters that overlap in memory with another tensor of the model, and of that tensor.

    Updating one of them changes the other, which the backward part may still read: their updates must wait.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(view):
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type != "meta":
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    found: dict[str, None] = {}
    for tensors in by_storage.values():
        for position, (name, tensor) in enumerate(tensors):
            for other_name, other in tensors[:position]:
                if (tensor.requires_grad or other.requires_grad) and _overlap(tensor, other):
                    found.update({other_name: None, name: None})
    return tuple(found)


def apart_from(bound: BoundBatch, parameters: Mapping[str, torch.Tensor]) -> BoundBatch:
    """``bound`` with clones of tensors that lie in the memory of a parameter, which is written before all is read."""
    tensors = tuple(_cloned_if_inside(tensor, parameters.values()) for tensor in bound.tensors)
    if all(mine is its for mine, its in zip(tensors, bound.tensors, strict=True)):
        return bound
    return replace(bound, tensors=tensors)


def _tensors(view: ModelView) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters, buffers and tensors kept as plain attributes, each once."""
    seen: set[int] = set()
    plain = (item for module in view.modules for item in vars(module).items())
    for name, tensor in (*view.parameters.items(), *view.buffers.items(), *plain):
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _overlap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = _extent(tensor), _extent(other)
    return first[0] < second[1] and second[0] < first[1]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes from the first element to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _cloned_if_inside(tensor: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    end = start + storage.nbytes()
    if start and any(start <= parameter.data_ptr() < end for parameter in parameters):
        return tensor.detach().clone()
    return tensor
