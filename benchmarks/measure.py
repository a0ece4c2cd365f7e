"""Bytes and seconds of a training step: allocator events, unique storages, interleaved rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.models import Batch
from benchmarks.peers import Contender
from graphopt.execute.measure import measure_memory

# The first step compiles and makes the optimizer's state, the second settles what is made lazily after that.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one steady-state step: the peak above the resting state, what rests between steps, and how long the
    first step took, which is when compilers compile."""

    peak_bytes: int
    resting_bytes: int
    first_step_seconds: float


def measure_step(contender: Contender, model: nn.Module, batch: Batch) -> StepMemory:
    """The StepMemory of ``contender`` after its warm-up steps."""
    peak_bytes, first_step_seconds = measure_peak(contender)
    resting = (*model_tensors(model, batch), *optimizer_tensors(contender.optimizer))
    return StepMemory(peak_bytes, storage_bytes(resting), first_step_seconds)


def measure_peak(contender: Contender) -> tuple[int, float]:
    """The peak of a step after the warm-up steps, above the level before it, and the seconds of the first step."""
    started = time.perf_counter()
    contender.step()
    first_step_seconds = time.perf_counter() - started
    for _ in range(WARM_UP_STEPS - 1):
        contender.step()
    gc.collect()
    return measure_memory(contender.step).peak_bytes, first_step_seconds


def model_tensors(model: nn.Module, batch: Batch) -> Iterator[torch.Tensor]:
    """Parameters, buffers and the batch: what is there whoever trains."""
    yield from model.parameters()
    yield from model.buffers()
    yield from batch.values()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of the optimizer's state; of those that are made of others, such as codes with scales, the parts."""
    for state in optimizer.state.values():
        for value in state.values():
            yield from plain_tensors(value)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """``value`` if it is a tensor with memory of its own, or the tensors that it wraps; nothing if it is no tensor."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in _storages(tensors)}.values())


def saved_by_autograd(forward: Callable[[], Any], *, resident: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that ``forward`` saves for its backward, without those of ``resident``."""
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # The storage is held, so that no later one can have its address.
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward()
    excluded = {storage.data_ptr() for storage in _storages(resident)}
    num_bytes = sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in excluded)
    del out
    return num_bytes


def interleaved_seconds(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, ...]]:
    """Seconds of every step by round. Each round runs all of them, so that noise of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            gc.collect()
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: tuple(values) for name, values in seconds.items()}


def median_seconds(seconds: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """The median of each step's seconds."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors)
