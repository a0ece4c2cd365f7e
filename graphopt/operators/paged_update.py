"""The update of one parameter whose state lies in far memory, as schemas; ``execute/paging/engine.py`` runs them.

::

    new_parameter, new_pages = graphopt.paged_update(parameter, gradient, pages, factor, numbers, rule, seed)
    graphopt.paged_update_(parameter, gradient, pages, factor, numbers, rule, seed)      # writes parameter and pages

``pages``: u8[bytes], the whole state of the parameter (``capture/page_layout.py`` says where each tensor lies): on the
CPU a memory map, beside a CUDA device page-locked memory of the host. ``factor``: what each element of the gradient is
multiplied with or divided by, as the rule says; where it is not finite, nothing is written. ``numbers``: those of the
parameter's group, in the rule's order. ``rule``: the name of a rule of this process (``capture/range_update.py``).
``seed``: of the parameter's random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LIBRARY = torch.library.Library("graphopt", "FRAGMENT")
_REST = "Tensor? factor, float[] numbers, str rule, int seed"
LIBRARY.define(f"paged_update(Tensor parameter, Tensor gradient, Tensor pages, {_REST}) -> (Tensor, Tensor)")
LIBRARY.define(f"paged_update_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) pages, {_REST}) -> ()")

PAGED_UPDATE = torch.ops.graphopt.paged_update.default
PAGED_UPDATE_ = torch.ops.graphopt.paged_update_.default


@torch.library.register_fake("graphopt::paged_update", lib=LIBRARY)
def _paged_update(
    parameter: Tensor,
    gradient: Tensor,
    pages: Tensor,
    factor: Tensor | None,
    numbers: Sequence[float],
    rule: str,
    seed: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(parameter), torch.empty_like(pages)


@torch.library.register_fake("graphopt::paged_update_", lib=LIBRARY)
def _paged_update_(
    parameter: Tensor,
    gradient: Tensor,
    pages: Tensor,
    factor: Tensor | None,
    numbers: Sequence[float],
    rule: str,
    seed: int,
) -> None:
    return None
