"""Optimizers as values: what to update, by which rule, with which options."""

from graphopt.optim.adam import Adam, AdamW
from graphopt.optim.base import Optimizer
from graphopt.optim.block import Adam8bit, AdamW8bit, Lion8bit
from graphopt.optim.interchange import export_state, export_weights, import_state
from graphopt.optim.lion import Lion
from graphopt.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Lion8bit",
    "Optimizer",
    "export_state",
    "export_weights",
    "import_state",
]
