"""Weights as the micro-steps of one window read them: quantized when the window is opened, let go when it is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.execute.executable import Executable
from graphopt.execute.fp8_history import Fp8History
from graphopt.ir.ambient import plain_execution
from graphopt.ir.fp8_watch import WEIGHT_HISTORY
from graphopt.ir.spec import InputKind


@dataclass
class _Held:
    """What one program gave: its outputs by name, and which writes of the parameters it has seen.

    ``next_history``: the rows of its weights with what was seen of them, by their names.
    """

    values: dict[str, torch.Tensor]
    versions: dict[str, tuple[int, int]]
    next_history: Mapping[tuple[str, ...], torch.Tensor]


@dataclass
class HeldWeights:
    """Codes and scales of the open window, and the next history of the weights, which counts once a window.

    A parameter that somebody else writes inside a window is quantized again. Writes through ``parameter.data`` leave no
    trace and are not seen.
    """

    _held: dict[int, _Held] = field(default_factory=dict)
    _current: _Held | None = None
    _pending: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(value.nbytes for held in self._held.values() for value in held.values.values())

    def refresh(
        self,
        executable: Executable,
        parameters: Mapping[str, torch.Tensor],
        inputs: Callable[[], Sequence[Any]],
    ) -> None:
        """Let ``tensor`` give what ``executable`` makes of ``parameters`` as they are; ``inputs``: what it reads."""
        program = executable.program
        names = [entry.name for _, entry in program.signature.inputs_of(InputKind.PARAM)]
        versions = {name: (parameters[name]._version, parameters[name].data_ptr()) for name in names}
        held = self._held.get(id(executable))
        if held is None or held.versions != versions:
            self._held.pop(id(executable), None)  # first: old and new codes are never there together
            held = None
            with plain_execution():
                outputs = executable.run(inputs())
            given = zip(program.signature.outputs, outputs, strict=True)
            values = {output.name: value for output, value in given}
            moved = values.pop(WEIGHT_HISTORY, None)
            rows = {} if moved is None else {program.fp8.watch.delayed_weights: moved}
            held = self._held[id(executable)] = _Held(values, versions, rows)
        self._current = held

    def note_read(self) -> None:
        """A micro-step that read what ``refresh`` gave counts: so does what was seen of its weights."""
        if self._current is not None:
            self._pending.update(self._current.next_history)

    def tensor(self, name: str) -> torch.Tensor:
        """The value that the micro-step's program knows as ``name``."""
        assert self._current is not None, "weights are quantized before a micro-step reads them"
        return self._current.values[name]

    def let_go(self) -> None:
        """No further micro-step reads them: the memory is the update's."""
        self._held.clear()
        self._current = None

    def close(self, history: Fp8History | None) -> None:
        """The window has ended: what was seen of its weights enters ``history``."""
        self.let_go()
        if history is not None:
            for names, rows in self._pending.items():
                history.put(names, rows)
        self._pending.clear()

    def forget(self) -> None:
        """Parameters and histories were loaded."""
        self.let_go()
        self._pending.clear()

    # ---- saving --------------------------------------------------------------------------------------------------

    def pending_rows(self) -> dict[str, torch.Tensor]:
        """What will enter the history, by tensor."""
        rows = (pair for names, table in self._pending.items() for pair in zip(names, table, strict=True))
        return dict(rows)

    def load_pending(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Restore what ``pending_rows`` gave."""
        self.forget()
        if rows:
            self._pending[tuple(rows)] = torch.stack(list(rows.values()))
