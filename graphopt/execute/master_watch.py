"""Float32 masters of parameters that somebody else wrote into: a loaded checkpoint, an average, a hand.

The update writes a parameter from its master, so a value that was put into it between two steps would be lost
without a word. Where a parameter was written since the last update, its elements that are no longer the rounded master
become the master. Writes through ``parameter.data`` leave no trace and are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphopt.kernels.flat_tensors import flat, has_layout_of, is_dense
from graphopt.optim.kept_state import MASTER

_PIECE = 1 << 20
"""Elements that are compared at a time: the comparison needs a few times 4 MiB, whatever the parameter takes."""


class MasterWatch:
    """Remembers how parameters with a master were left by the last update."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int]] = {}

    def follow(self, parameters: Mapping[str, torch.Tensor], states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let the masters in ``states`` follow ``parameters`` that were written since the last update."""
        for name, parameter in parameters.items():
            state = states.get(parameter) or {}
            if MASTER in state and self._left.get(name) != _version(parameter):
                _take_over(parameter.detach(), state[MASTER])
                self._left[name] = _version(parameter)

    def updated(self, names: Iterable[str], parameters: Mapping[str, torch.Tensor]) -> None:
        """The update has just written these parameters."""
        self._left.update({name: _version(parameters[name]) for name in names})


def _version(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _take_over(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Write into ``master`` (f32) those elements of ``parameter`` that it does not round to."""
    if not is_dense(parameter) or not has_layout_of(master, parameter):
        _take_over_whole(parameter, master)
        return
    narrow, wide = flat(parameter), flat(master)
    for start in range(0, narrow.numel(), _PIECE):
        _take_over_whole(narrow[start : start + _PIECE], wide[start : start + _PIECE])


def _take_over_whole(parameter: torch.Tensor, master: torch.Tensor) -> None:
    near = master.to(parameter.device)  # a paged one lies on the host
    same = (near.to(parameter.dtype) == parameter) | (near.isnan() & parameter.isnan())
    if not bool(same.all()):
        master.copy_(torch.where(same, near, parameter.to(near.dtype)))
