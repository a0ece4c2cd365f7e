"""In which format each parameter's state is kept, decided once for a parameter and remembered."""

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

    def note_embeddings(self, names: Iterable[str]) -> None:
        """Rows of these parameters are looked up."""
        self.embeddings.update(names)

    def choice(self, name: str, parameter: torch.Tensor, options: Mapping[str, Any]) -> StateChoice:
        """The StateChoice of ``parameter``; the first one stays until its group asks for another."""
        key = (name, str(options["state"]))
        if key not in self._decided:
            facts = ParameterFacts(TensorSpec.of(parameter), name in self.embeddings)
            self._decided[key] = self.optimizer.state_choice(options, facts)
        return self._decided[key]

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
