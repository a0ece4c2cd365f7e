"""Decomposing a program overrides torch's composite operators as the decomposition before it did.

``ExportedProgram.run_decompositions`` gives some 500 composite operators ten kernels each and takes them away at the
end: half of the time that decomposing a small model takes. They are the same each time, so what torch put in the first
time is put in again. Where an operator or its kernels are not those of that time, or torch does this by other means,
torch does it as it does.

Private torch: ``_override_composite_implicit_decomp`` and what it writes, ``py_kernels``, ``_dispatch_cache`` and
``op_implementations_dict`` (torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.export.exported_program
from torch._subclasses.fake_impls import op_implementations_dict

from graphopt.capture.replaced_function import replaced_function

_NAME = "_override_composite_implicit_decomp"

Override = Callable[[Mapping[Any, Any]], AbstractContextManager[None]]


@dataclass(frozen=True)
class _State:
    """The kernels and the fake implementation (or None) of an operator."""

    kernels: dict[Any, Any]
    fake: Any

    @classmethod
    def of(cls, operator: Any) -> _State:
        return cls(dict(operator.py_kernels), op_implementations_dict.get(operator))

    def put(self, operator: Any) -> None:
        operator.py_kernels.clear()
        operator.py_kernels.update(self.kernels)
        operator._dispatch_cache.clear()
        if self.fake is None:
            op_implementations_dict.pop(operator, None)
        else:
            op_implementations_dict[operator] = self.fake


@dataclass(frozen=True)
class _Overridden:
    """What was asked for, and the state of each operator before and inside."""

    asked: dict[Any, Any]
    before: dict[Any, _State]
    inside: dict[Any, _State]


class _Memory:
    """The last override that torch made."""

    def __init__(self) -> None:
        self.last: _Overridden | None = None

    @contextmanager
    def override(self, original: Override, asked: Mapping[Any, Any]) -> Iterator[None]:
        """As ``original(asked)``."""
        before = {operator: _State.of(operator) for operator in asked}
        last = self.last
        if last is None or last.asked != asked or last.before != before:
            with original(asked):
                self.last = _Overridden(dict(asked), before, {operator: _State.of(operator) for operator in asked})
                yield
            return
        try:
            for operator, state in last.inside.items():
                state.put(operator)
            yield
        finally:
            for operator, state in before.items():
                state.put(operator)


_MEMORY = _Memory()


def overrides_remembered() -> AbstractContextManager[None]:
    """Inside, composite operators are overridden as they were the last time."""
    module = torch.export.exported_program
    return replaced_function(module, _NAME, lambda original: lambda asked: _MEMORY.override(original, asked))
