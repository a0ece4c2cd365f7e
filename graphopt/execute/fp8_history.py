"""What delayed scaling has seen: for each quantized tensor its largest absolute values in the last micro-steps.

Tensors are known by name. A program gets the rows of its tensors as one table; where the next program has others
(another batch shape makes other products eligible), the table is put together anew from the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import StateError
from graphopt.fp8 import Delayed
from graphopt.ir.fp8_watch import CALL_MARK, Fp8Watch
from graphopt.kernels.fp8_format import FORMATS
from graphopt.operators.fp8_history import history_scales


@dataclass
class _Table:
    """Live rows f32[T,H] of the tensors ``names``, the latest value first."""

    names: tuple[str, ...]
    values: torch.Tensor


class Fp8History:
    """Rows of ``length`` values by name; zeros stand for nothing seen."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._tables: dict[str, _Table] = {}
        self._parked: dict[str, torch.Tensor] = {}

    def table(self, state_name: str, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
        """The live rows of ``names``, f32[T,H], which programs read and write as ``state_name``."""
        table = self._tables.get(state_name)
        if table is None or table.names != names:
            self._park(state_name)
            self._park_those_with(names)
            table = self._tables[state_name] = _Table(names, self._assembled(names, device))
        if table.values.device != device:
            table.values = table.values.to(device)
        return table.values

    def as_it_stands(self, names: Sequence[str], device: torch.device) -> torch.Tensor:
        """The rows of ``names``, f32[T,H], new, for a program that moves none; zeros for a tensor without one.

        Names count the calls of a module, or slices of a value. Where training quantizes another number of them, which
        is which is not known: these tensors are given none.
        """
        rows = self._rows()
        trained, asked = Counter(map(_without_call, rows)), Counter(map(_without_call, names))
        known = {name for name in rows if trained[_without_call(name)] == asked[_without_call(name)]}
        nothing = torch.zeros(self.length, device=device)
        return torch.stack([rows[name].to(device) if name in known else nothing for name in names])

    def put(self, names: tuple[str, ...], values: torch.Tensor) -> None:
        """Let the rows of ``names`` be ``values`` f32[T,H]."""
        table = next((table for table in self._tables.values() if table.names == names), None)
        if table is not None:
            table.values.copy_(values)
            return
        self._park_those_with(names)
        self._parked.update(zip(names, (self._fitted(row) for row in values), strict=True))

    def rows(self) -> dict[str, torch.Tensor]:
        """A copy of the row f32[H] of every tensor, by name."""
        return {name: row.clone() for name, row in sorted(self._rows().items())}

    def load(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Take over ``rows``; of longer ones the latest values, shorter ones are filled up with nothing seen."""
        self._tables.clear()
        self._parked = {name: self._fitted(row) for name, row in rows.items()}

    def _rows(self) -> dict[str, torch.Tensor]:
        live = {
            name: row for table in self._tables.values() for name, row in zip(table.names, table.values, strict=True)
        }
        return {**self._parked, **live}

    def _park(self, state_name: str) -> None:
        table = self._tables.pop(state_name, None)
        if table is not None:
            self._parked.update(zip(table.names, table.values.clone().unbind(), strict=True))

    def _park_those_with(self, names: tuple[str, ...]) -> None:
        """Park each table that has a row of ``names``: a tensor that noise is part of in training alone changes
        tables."""
        for state_name in [key for key, table in self._tables.items() if not set(names).isdisjoint(table.names)]:
            self._park(state_name)

    def _assembled(self, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
        rows = [self._parked.pop(name, None) for name in names]
        nothing = torch.zeros(self.length, device=device)
        return torch.stack([nothing if row is None else row.to(device) for row in rows])

    def _fitted(self, row: torch.Tensor) -> torch.Tensor:
        fitted = row.new_zeros(self.length)
        kept = min(self.length, row.numel())
        fitted[:kept] = row[:kept]
        return fitted


def scales_of(table: torch.Tensor, watch: Fp8Watch, recipe: Delayed) -> torch.Tensor:
    """f32[T], new: the scales that follow from ``table`` f32[T,H], for tensors of the formats in ``watch``."""
    largest = [FORMATS[name].largest for name in watch.formats]
    return history_scales(table, largest, recipe.margin, recipe.algo == "most_recent", recipe.power_of_two)


def _without_call(name: str) -> str:
    return name.partition(CALL_MARK)[0]


def saved_rows(rows: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """``rows`` as a state dict holds them: names and one table f32[T,H]."""
    return {"names": list(rows), "values": torch.stack(list(rows.values())) if rows else torch.zeros(0, 0)}


def checked_rows(saved: object) -> dict[str, torch.Tensor]:
    """The rows in what ``saved_rows`` gave; StateError if it is damaged."""
    if not isinstance(saved, Mapping) or set(saved) != {"names", "values"}:
        raise StateError(f"expected names and values of an FP8 history, came {_keys(saved)}")
    names, values = saved["names"], saved["values"]
    if not isinstance(values, torch.Tensor) or values.dtype != torch.float32 or values.dim() != 2:
        raise StateError("the values of an FP8 history are a float32 table of one row for each tensor; this is none")
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise StateError(f"the names of an FP8 history are a list of strings, came {names!r}")
    if len(names) != values.shape[0] or len(set(names)) != len(names):
        raise StateError(f"the FP8 history has {values.shape[0]} rows for the names {list(names)}")
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise StateError("the FP8 history holds values that are no largest absolute values: negative, Inf or NaN")
    return dict(zip(names, values.clone().unbind(), strict=True))


def _keys(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
