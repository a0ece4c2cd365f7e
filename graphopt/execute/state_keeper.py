"""What a step knows about the state of its parameters: how each is kept, and whether a saved one fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphopt.capture.update_bucket import make_bucket
from graphopt.errors import StateError
from graphopt.execute.state_checks import check_state
from graphopt.execute.state_choices import StateChoices
from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Optimizer
from graphopt.optim.kept_state import KeptState
from graphopt.optim.state import StateChoice, Weights


class StateKeeper:
    """Parameters by name, the choices about their state, and the number of updates so far."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter], weights: Weights = Weights.OWN
    ) -> None:
        self.optimizer = optimizer
        self.known = dict(parameters)
        self.choices = StateChoices(optimizer, weights)
        self.updates = 0

    def kept(self, name: str, options: Mapping[str, Any]) -> KeptState:
        """How the state of parameter ``name`` in a group with ``options`` is kept."""
        return self._kept(name, options, self.choices.choice(name, self.known[name], options))

    def check(
        self, name: str, options: Mapping[str, Any], values: Mapping[str, Any], record: Mapping[str, Any] | None
    ) -> KeptState:
        """How the saved ``values`` are kept; StateError if this step would keep them in another way.

        ``record``: what was saved about the meaning of 8-bit codes.
        """
        if name not in self.known:
            raise StateError(f"the state holds {name!r}, which the model does not have")
        choices = self.choices.possible(name, self.known[name], options)
        possible = [self._kept(name, options, choice) for choice in choices]
        return check_state(name, values, record, possible, counts_steps=self.optimizer.counts_steps)

    def settle(self, name: str, options: Mapping[str, Any], kept: KeptState) -> None:
        """State was loaded that is kept like this."""
        self.choices.settle(name, options, kept.choice)

    def _kept(self, name: str, options: Mapping[str, Any], choice: StateChoice) -> KeptState:
        parameter = self.known[name]
        weights = self.choices.weights(name, parameter)
        bucket = make_bucket(
            self.optimizer, options, name="0", parameters=(name,), state_format=choice.format, weights=weights
        )
        spec = TensorSpec.of(parameter)
        return KeptState(choice, weights, bucket.state_specs(spec), spec)
