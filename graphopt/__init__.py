"""graphopt: a compiler for training steps."""

from graphopt import torch_range  # noqa: F401  # before anything that needs the right torch

# isort: split
from graphopt import checkpoint, errors, fp8, optim, passes
from graphopt.api import capture, compile, optimize
from graphopt.autocast_table import autocast_table
from graphopt.capture.differentiate import differentiate
from graphopt.eligibility import fp8_table
from graphopt.loss_scale import LossScale
from graphopt.options import Accumulate
from graphopt.pipeline.pipeline import Pipeline
from graphopt.precision import Precision
from graphopt.train.saving import load_checkpoint, load_model, save_checkpoint, save_model
from graphopt.version import __version__

__all__ = [
    "Accumulate",
    "LossScale",
    "Pipeline",
    "Precision",
    "__version__",
    "autocast_table",
    "capture",
    "checkpoint",
    "compile",
    "differentiate",
    "errors",
    "fp8",
    "fp8_table",
    "load_checkpoint",
    "load_model",
    "optim",
    "optimize",
    "passes",
    "save_checkpoint",
    "save_model",
]
