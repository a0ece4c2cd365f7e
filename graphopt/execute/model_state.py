"""The training state of a model: its parameters under all their names, and what can be known of them before a graph."""

from __future__ import annotations

import torch

from graphopt.execute.model_view import embedding_parameters, parameter_aliases, view_model
from graphopt.execute.train_state import TrainState
from graphopt.optim.base import Optimizer
from graphopt.optim.state import Weights


def model_state(model: torch.nn.Module, optimizer: Optimizer, *, weights: Weights = Weights.OWN) -> TrainState:
    """A fresh TrainState of ``model``; ``weights``: what is done for parameters of two bytes an element."""
    known = view_model(model).parameters
    state = TrainState(optimizer, known, weights=weights, aliases=parameter_aliases(model, known))
    state.choices.hint_embeddings(embedding_parameters(model, known))
    return state
