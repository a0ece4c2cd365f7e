"""The state of each parameter as a report lists it: its format, its bytes, and why it is kept so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphopt.execute.train_state import TrainState
from graphopt.ir.spec import TensorSpec

NO_STATE = "none"


@dataclass(frozen=True)
class StateRow:
    """Optimizer state of one parameter. ``format``: ``float32``, ``int8 by blocks of 256, companded``, ... or ``none``;
    ``nbytes``: of all its state tensors, master copy included, without the step count. ``is_paged``: they
    lie in far memory.
    """

    parameter: str
    spec: str
    device: str
    format: str
    nbytes: int
    reason: str
    by_blocks: bool = False
    is_paged: bool = False


def state_rows(state: TrainState, reached: Iterable[str]) -> tuple[StateRow, ...]:
    """A row for each parameter of the model, in its order; ``reached``: those that a gradient was computed for."""
    trained = set(reached)
    return tuple(_row(state, name, is_trained=name in trained) for name in state.known)


def _row(state: TrainState, name: str, *, is_trained: bool) -> StateRow:
    parameter = state.known[name]
    spec = TensorSpec.of(parameter)
    where = (name, str(spec), spec.device.type)
    if not is_trained and not state.facade.state.get(parameter):
        reason = "no gradient reaches it" if parameter.requires_grad else "frozen"
        return StateRow(*where, NO_STATE, 0, reason)
    kept = state.kept(name)
    is_paged = state.pager.is_paged(name)
    label = f"{kept.label}, paged" if is_paged else kept.label
    return StateRow(*where, label, kept.nbytes, kept.choice.reason, kept.block_format is not None, is_paged)
