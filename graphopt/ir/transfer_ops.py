"""The four operators that send a value to far memory and bring it back, as schemas; ``execute/offload.py`` runs them.

::

    ticket = graphopt.offload(x)              # starts the copy out
    sent = graphopt.offloaded(ticket, x)      # waits for it; x is not read after this, so it can die here
    y = graphopt.prefetch(sent, ...)          # makes a buffer laid out as x was and starts the copy in
    ready = graphopt.arrived(y, sent)         # waits for it; y is not read before this

A ticket is one int64 on the CPU: the number of a transfer, never used twice in a process. It stands for content, not
for an address: two values in one memory, or one after the other at one address, have two numbers. The far memory of a
transfer is given back when its ticket dies, wherever that happens: in the step, or with a forward that never sees its
backward. ``offloaded`` and ``arrived`` return their first argument itself, and their schemas say so.

A value in flight has a user still to come (``offloaded`` for x, ``arrived`` for y), so liveness keeps its memory, and
nothing can write into it. Two calls are never one: each starts a transfer or waits for its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LIBRARY = torch.library.Library("graphopt", "FRAGMENT")
LIBRARY.define("offload(Tensor x) -> Tensor")
LIBRARY.define("offloaded(Tensor(a) ticket, Tensor x) -> Tensor(a)")
LIBRARY.define("prefetch(Tensor ticket, int[] size, int[] stride, *, ScalarType dtype, Device device) -> Tensor")
LIBRARY.define("arrived(Tensor(a) buffer, Tensor ticket) -> Tensor(a)")

OFFLOAD = torch.ops.graphopt.offload.default
OFFLOADED = torch.ops.graphopt.offloaded.default
PREFETCH = torch.ops.graphopt.prefetch.default
ARRIVED = torch.ops.graphopt.arrived.default


@torch.library.register_fake("graphopt::offload", lib=LIBRARY)
def _offload(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.register_fake("graphopt::offloaded", lib=LIBRARY)
def _offloaded(ticket: Tensor, x: Tensor) -> Tensor:
    return ticket


@torch.library.register_fake("graphopt::prefetch", lib=LIBRARY)
def _prefetch(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@torch.library.register_fake("graphopt::arrived", lib=LIBRARY)
def _arrived(buffer: Tensor, ticket: Tensor) -> Tensor:
    return buffer
