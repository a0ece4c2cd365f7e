"""What would run in FP8, without training or a device: the table of a model and a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphopt.build import training_program
from graphopt.fp8 import Recipe, recipe_of
from graphopt.ir.fp8_table import Fp8Table
from graphopt.ir.program import Stage
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline
from graphopt.precision import Precision, precision_for


def fp8_table(
    model: torch.nn.Module,
    batch: Any,
    recipe: Recipe | str = "tensorwise",
    *,
    outputs: Sequence[str] | None = None,
    loss: str | Callable[[Any, Any], Any] | None = None,
    target: str | None = None,
) -> Fp8Table:
    """Which matrix products of a training step of ``model`` on ``batch`` run in FP8 under ``recipe``, and why.

    ``outputs`` and ``loss`` as in ``graphopt.compile``. ``target``: the class of device whose costs count, such as
    "H100" (None: that of the recipe). Raises UnsupportedError for a target or a recipe that is not known.
    """
    chosen = recipe_of(recipe)
    chosen = chosen if target is None else replace(chosen, target=target)
    precision = precision_for(model, Precision(compute="fp8", fp8=chosen))
    joint = training_program(model, batch, outputs=outputs, loss=loss, precision=precision)
    passes = default_pipeline(Stage.JOINT, precision=precision).passes
    last = next(position for position, item in enumerate(passes) if item.name == "tag-fp8")
    return Pipeline(passes[: last + 1]).run(joint).fp8
