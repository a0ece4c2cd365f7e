"""Brings the state of parameters into pages: at the first step, when state was loaded, when somebody replaced it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphopt.capture.page_layout import PageLayout
from graphopt.capture.range_update import pages_layout
from graphopt.capture.update_bucket import make_bucket
from graphopt.errors import StateError
from graphopt.execute.paging.store import PageStore
from graphopt.execute.state_keeper import StateKeeper
from graphopt.ir.spec import TensorSpec
from graphopt.optim.facade import OptimizerFacade
from graphopt.optim.kept_state import MASTER, KeptState, memory_order


class StatePager:
    """What of a step's state is paged; ``facade`` says which group a parameter is in, and tells of state replaced."""

    def __init__(self, keeper: StateKeeper, facade: OptimizerFacade) -> None:
        self.keeper = keeper
        self.facade = facade
        self.store = PageStore(keeper.optimizer)
        if self.store.is_on:
            me = weakref.ref(self)  # so that both die when the step does, without waiting for the collector
            facade.after_replacing = lambda states: _repage(me(), states)

    def is_paged(self, name: str) -> bool:
        """Whether the state of ``name`` lies in pages."""
        return self.store.is_paged(name)

    def decide(self, names: Iterable[str]) -> None:
        """Decide at once for those of ``names`` that are new which of them keep their state in ordinary memory."""
        fresh = self.store.undecided(names)
        self.store.decide({name: self._kept(name).nbytes for name in fresh}, self.keeper.known)

    def pages(self, name: str, state: dict[str, Any]) -> torch.Tensor:
        """The pages of ``name``, with all that ``state`` holds of it in them. Raises StateError where that is kept in
        another way than the parameter now needs.
        """
        kept = self._kept(name)
        for key, spec in kept.specs.items():
            if key in state and not _fits(TensorSpec.of(state[key]), spec):
                raise StateError(
                    f"state {key} of {name!r} is {TensorSpec.of(state[key])}, the parameter now needs {spec}: cast the "
                    "state as the parameter was, or compile a new step"
                )
        parameter = self.keeper.known[name]
        return self.store.page_in(name, self._layout(name, kept), parameter, state, self._fill(parameter))

    def reserve(self, names: Iterable[str]) -> None:
        """Make room for the state of those of ``names`` that are paged, before anything is changed."""
        paged = [name for name in names if self.is_paged(name)]
        for name in paged:
            self.store.reserve(name, self._layout(name, self._kept(name)), self.keeper.known[name])

    def repage(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Page what ``states`` (by parameter) holds in new tensors, as loading in torch's way leaves it."""
        loaded = {name: states[parameter] for name, parameter in self.keeper.known.items() if states.get(parameter)}
        self.decide(loaded)
        self.reserve(loaded)
        for name, state in loaded.items():
            if self.is_paged(name):
                self.pages(name, state)

    def _kept(self, name: str) -> KeptState:
        return self.keeper.kept(name, self._options_of(name))

    def _options_of(self, name: str) -> Mapping[str, Any]:
        return self.facade.param_groups[self.facade.group_of(self.keeper.known[name])]

    def _layout(self, name: str, kept: KeptState) -> PageLayout:
        optimizer, options = self.keeper.optimizer, self._options_of(name)
        bucket = make_bucket(
            optimizer, options, name="", parameters=(name,), state_format=kept.choice.format, weights=kept.weights
        )
        return pages_layout(bucket, kept.parameter)

    def _fill(self, parameter: torch.Tensor) -> Callable[[str, torch.Tensor], None]:
        """Fills a state tensor with what it holds before the first update."""

        def fill(name: str, tensor: torch.Tensor) -> None:
            if name == MASTER:
                tensor.copy_(parameter.detach())
            else:
                tensor.zero_()

        return fill


def _fits(found: TensorSpec, needed: TensorSpec) -> bool:
    """Whether a state tensor may be copied into one of ``needed``; blocks of codes follow their order in memory."""
    if (found.dtype, found.shape) != (needed.dtype, needed.shape):
        return False
    return needed.dtype not in (torch.int8, torch.uint8) or memory_order(found) == memory_order(needed)


def _repage(pager: StatePager | None, states: Mapping[Any, dict[str, Any]]) -> None:
    if pager is not None:
        pager.repage(states)
