"""In which format each parameter's state is kept, decided once for a parameter under a graph and remembered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphopt.errors import UnsupportedError
from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Optimizer
from graphopt.optim.state import ParameterFacts, StateChoice, Weights

log = logging.getLogger(__name__)

_NARROW = (torch.bfloat16, torch.float16)


class StateChoices:
    """Decides formats for an optimizer; ``weights``: what is done for parameters of two bytes an element."""

    def __init__(self, optimizer: Optimizer, weights: Weights = Weights.OWN) -> None:
        self.optimizer = optimizer
        self.embeddings: set[str] = set()
        self._weights = weights
        self._decided: dict[tuple[str, str], StateChoice] = {}
        self._warned = False
        self._is_settled = False

    def hint_embeddings(self, names: Iterable[str]) -> None:
        """Rows of these parameters are probably looked up: what is known before a graph is captured."""
        if not self._is_settled:
            self.embeddings.update(names)

    def note_embeddings(self, names: Iterable[str]) -> None:
        """Rows of these parameters are looked up, as a captured graph shows."""
        if not self._is_settled:
            self.embeddings.clear()
        self._is_settled = True
        self.embeddings.update(names)

    def choice(self, name: str, parameter: torch.Tensor, options: Mapping[str, Any]) -> StateChoice:
        """The StateChoice of ``parameter``; the first one under a graph stays until its group asks for another."""
        key = (name, str(options["state"]))
        if key in self._decided:
            return self._decided[key]
        found = self._choose(name, parameter, options, is_embedding=name in self.embeddings)
        if self._is_settled:
            self._decided[key] = found
        return found

    def possible(self, name: str, parameter: torch.Tensor, options: Mapping[str, Any]) -> tuple[StateChoice, ...]:
        """The choices that can come out once a graph is captured, the likeliest first; one if there is a graph."""
        found = self.choice(name, parameter, options)
        if self._is_settled:
            return (found,)
        other = self._choose(name, parameter, options, is_embedding=name not in self.embeddings)
        return (found,) if other.format == found.format else (found, other)

    def settle(self, name: str, options: Mapping[str, Any], choice: StateChoice) -> None:
        """State in this format was loaded: the choice stays, whatever a graph shows."""
        self._decided[(name, str(options["state"]))] = choice

    def _choose(
        self, name: str, parameter: torch.Tensor, options: Mapping[str, Any], *, is_embedding: bool
    ) -> StateChoice:
        return self.optimizer.state_choice(options, ParameterFacts(TensorSpec.of(parameter), is_embedding))

    def weights(self, name: str, parameter: torch.Tensor) -> Weights:
        """How ``parameter`` is kept exact; UnsupportedError where its dtype does not allow what was asked for."""
        if parameter.dtype not in _NARROW:
            return Weights.OWN
        if self._weights is Weights.OWN:
            self._warn_once(name, parameter)
        elif self._weights is not Weights.MASTER and parameter.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"master={str(self._weights)!r} is for bfloat16 parameters, but {name!r} is {parameter.dtype}: use "
                "master='fp32'"
            )
        return self._weights

    def _warn_once(self, name: str, parameter: torch.Tensor) -> None:
        if self._warned:
            return
        self._warned = True
        log.warning(
            "parameter %r is %s and is updated in that dtype, as torch does: updates smaller than its last digit are "
            "lost. precision=graphopt.Precision(master='fp32') keeps a float32 copy",
            name,
            parameter.dtype,
        )
