"""Optimizers as values: what to update, by which rule, with which options."""

from graphopt.optim.adam import Adam, AdamW
from graphopt.optim.base import Optimizer
from graphopt.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
