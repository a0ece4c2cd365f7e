"""The update of one parameter whose state lies in far memory, as schemas; ``execute/paging/engine.py`` runs them.

::

    first = graphopt.page_in(pages, staging, rule, numel, device=...)  # starts to fetch the first range
    new_parameter, new_pages = graphopt.paged_update(parameter, gradient, pages, factor, numbers, rule, seed, staging)
    graphopt.paged_update_(parameter, gradient, pages, ..., staging, first)      # writes parameter and pages

``pages``: u8[bytes], the whole state of the parameter (``capture/page_layout.py`` says where each tensor lies): on the
CPU a memory map, beside a CUDA device page-locked memory of the host. ``factor``: what each element of the gradient is
multiplied with or divided by, as the rule says; where it is not finite, nothing is written. ``numbers``: those of the
parameter's group, in the rule's order. ``rule``: the name of a rule of this process (``capture/range_update.py``).
``seed``: of the parameter's random numbers. ``staging``: bytes of a buffer for one range; ``first``: one in which the
first range is on its way already (None: it is not). ``numel``: elements of the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("graphopt", "FRAGMENT")
_REST = "Tensor? factor, float[] numbers, str rule, int seed, int staging, Tensor? first=None"
LIBRARY.define("page_in(Tensor pages, int staging, str rule, int numel, *, Device device) -> Tensor")
LIBRARY.define(f"paged_update(Tensor parameter, Tensor gradient, Tensor pages, {_REST}) -> (Tensor, Tensor)")
LIBRARY.define(f"paged_update_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) pages, {_REST}) -> ()")

PAGE_IN = torch.ops.graphopt.page_in.default
PAGED_UPDATE = torch.ops.graphopt.paged_update.default
PAGED_UPDATE_ = torch.ops.graphopt.paged_update_.default


@torch.library.register_fake("graphopt::page_in", lib=LIBRARY)
def _page_in(pages: Tensor, staging: int, rule: str, numel: int, *, device: torch.device) -> Tensor:
    return torch.empty(staging, dtype=torch.uint8, device=device)


@torch.library.register_fake("graphopt::paged_update", lib=LIBRARY)
def _paged_update(parameter: Tensor, gradient: Tensor, pages: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(parameter), torch.empty_like(pages)


@torch.library.register_fake("graphopt::paged_update_", lib=LIBRARY)
def _paged_update_(*_: Any, **__: Any) -> None:
    return None
