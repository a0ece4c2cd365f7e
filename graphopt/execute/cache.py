"""Compiled graphs by batch signature, bounded."""

from __future__ import annotations

import enum
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from graphopt.capture.batch import BoundBatch
from graphopt.execute.collector import paused_collector

log = logging.getLogger(__name__)

_COMPILING = threading.RLock()

Built = TypeVar("Built")


class SignatureCache(Generic[Built]):
    """The most recently used ``limit`` graphs. Past it the oldest goes, with one warning that says what varied."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.built: OrderedDict[Hashable, Built] = OrderedDict()
        self.compiled = 0
        self.warned = False

    def get(
        self,
        key: Hashable,
        build: Callable[[], Built],
        *,
        describe: str,
        is_current: Callable[[Built], bool] = lambda _: True,
    ) -> Built:
        """The graph for ``key``, built when it is not there, or is not current any more: then it goes first."""
        if key in self.built and is_current(self.built[key]):
            self.built.move_to_end(key)
            return self.built[key]
        self.built.pop(key, None)
        # torch's tracers patch process-wide state, and some random factories draw while they are traced.
        with _COMPILING, paused_collector(), torch.random.fork_rng(), torch.inference_mode(False):
            found = build()
        self.compiled += 1
        self.built[key] = found
        if len(self.built) > self.limit:
            self.built.popitem(last=False)
            self._warn(describe)
        return found

    def _warn(self, describe: str) -> None:
        if self.warned:
            return
        self.warned = True
        log.warning(
            "more than %d batch signatures were compiled (the last: %s); every new shape, dtype, mode or frozen set "
            "compiles again and the oldest graph is dropped. Pad batches to a few fixed lengths (bucketing), drop the "
            "last incomplete batch, or raise max_signatures",
            self.limit,
            describe,
        )


def batch_key(bound: BoundBatch) -> Hashable:
    """What a graph depends on in a batch: structure, fixed values, and shape, stride, dtype, device of every tensor."""
    tensors = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in bound.tensors)
    return (bound.names, tensors, tuple(map(_fixed, bound.leaves)), str(bound.structure))


def describe_batch(bound: BoundBatch) -> str:
    """The batch's tensors as ``name [shape]``."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in zip(bound.names, bound.tensors, strict=True))


def ambient_key() -> Hashable:
    """Global modes that change what a model computes."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
    )


def _fixed(leaf: object) -> Hashable:
    """``leaf`` with its type, as text where equal does not mean the same: 0.0 and -0.0, 1 and True inside a set."""
    if isinstance(leaf, enum.Enum):
        return (type(leaf), leaf)
    if isinstance(leaf, frozenset):
        return (type(leaf), tuple(sorted(map(repr, leaf))))
    return (type(leaf), repr(leaf))
