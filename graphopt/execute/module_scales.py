"""Delayed scaling of a module without an optimizer: it keeps the histories, and moves them as each part has run.

Inputs and weights enter with the forward part, gradients with the backward part, each once; a forward part without
gradients reads the histories and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import StateError
from graphopt.execute.fp8_history import Fp8History, checked_rows, saved_rows, scales_of
from graphopt.fp8 import Delayed
from graphopt.ir.fp8_watch import FP8_AMAX, FP8_AMAX_BACKWARD, HISTORY, SCALES
from graphopt.ir.program import Program
from graphopt.ir.spec import Input, OutputKind, TensorSpec


class ModuleScales:
    """Histories by tensor name, and the scales that follow from them."""

    def __init__(self, recipe: Delayed) -> None:
        self.recipe = recipe
        self.history = Fp8History(recipe.history)

    def scales(self, program: Program, entry: Input) -> torch.Tensor:
        """f32[T], new: the scales of the tensors that ``program`` quantizes."""
        assert entry.name == SCALES and isinstance(entry.spec, TensorSpec), f"a module reads no state {entry.name}"
        watch, device = program.fp8.watch, entry.spec.device
        if watch.reported:
            table = self.history.table(HISTORY, watch.delayed, device)
        else:  # it will move none
            table = self.history.as_it_stands(watch.delayed, device)
        return scales_of(table, watch, self.recipe)

    def saw_forward(self, program: Program, outputs: Sequence[Any]) -> None:
        """The forward part of ``program`` has run."""
        self._saw(program, outputs, FP8_AMAX)

    def saw_backward(self, program: Program, outputs: Sequence[Any]) -> None:
        """The backward part of ``program`` has run."""
        self._saw(program, outputs, FP8_AMAX_BACKWARD)

    def _saw(self, program: Program, outputs: Sequence[Any], name: str) -> None:
        """Let the largest values of one part enter; none does if one of them is Inf or NaN."""
        users = program.signature.outputs_of(OutputKind.USER)
        amax = next((outputs[i] for i, output in users if output.name == name), None)
        if amax is None:
            return
        names = program.fp8.watch.delayed
        table = self.history.table(HISTORY, names, amax.device)
        start = 0 if name == FP8_AMAX else len(names) - amax.numel()
        rows = table[start : start + amax.numel()]
        moved = torch.cat([amax.unsqueeze(1), rows[:, :-1]], dim=1)
        rows.copy_(torch.where(torch.isfinite(amax).all(), moved, rows))

    def state_dict(self) -> dict[str, Any]:
        """The histories by tensor name."""
        return {"history": saved_rows(self.history.rows())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave; StateError if it is damaged."""
        if not isinstance(saved, Mapping) or set(saved) != {"history"}:
            came = sorted(map(str, saved)) if isinstance(saved, Mapping) else repr(saved)
            raise StateError(f"expected the history of delayed scaling, came {came}")
        self.history.load(checked_rows(saved["history"]))
