"""All the memory that tensors hold, whoever keeps them: what an optimizer's ``state`` does not show is counted too."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch import nn

# Fake tensors and wrappers have no memory; what wrappers are made of is found on its own.
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)

Storages = Mapping[int, torch.UntypedStorage]


def live_storages() -> Storages:
    """Every storage in host memory that a living tensor uses, by its address.

    Whoever keeps the result keeps the storages, so that none made later can have the address of one of them.
    """
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for item in gc.get_objects():
        if type(item) in _PLAIN and item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            if storage.data_ptr():
                found[storage.data_ptr()] = storage
    return found


def bytes_since(before: Storages) -> int:
    """Bytes of the storages that live now and are not in ``before``."""
    return sum(storage.nbytes() for pointer, storage in live_storages().items() if pointer not in before)
