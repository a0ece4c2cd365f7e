"""Whether a loaded state fits a parameter: shapes, and codes with the scales that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphopt.errors import StateError
from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Optimizer
from graphopt.optim.state import BlockState, scale_name

_CODES = (torch.int8, torch.uint8)


def check_state(name: str, values: Mapping[str, Any], parameter: TensorSpec, optimizer: Optimizer) -> None:
    """Raise StateError unless ``values`` can be the state of the parameter ``name`` under ``optimizer``."""
    scales = {key for key in values if key.endswith(scale_name(""))}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or key in scales or key == "step":
            continue
        if value.shape != torch.Size(parameter.shape):
            raise StateError(
                f"state {key} of {name!r} has shape {list(value.shape)}, the parameter {list(parameter.shape)}"
            )
        if value.dtype in _CODES:
            _check_scales(name, key, values, parameter, getattr(optimizer, "block_format", None))
    orphans = [key for key in sorted(scales) if key.removesuffix(scale_name("")) not in values]
    if orphans:
        raise StateError(f"the state of {name!r} has {', '.join(orphans)} without the codes that they scale")


def _check_scales(
    name: str, key: str, values: Mapping[str, Any], parameter: TensorSpec, block_format: BlockState | None
) -> None:
    scales = values.get(scale_name(key))
    if not isinstance(scales, torch.Tensor):
        raise StateError(f"the state of {name!r} has 8-bit codes {key}, but no {scale_name(key)} to read them with")
    if block_format is None:
        raise StateError(
            f"state {key} of {name!r} is kept by blocks in 8 bits, which this optimizer does not do: compile with an "
            "8-bit optimizer, or export the state for torch.optim and import that"
        )
    expected = -(-parameter.numel // block_format.block)
    if scales.dtype != torch.float32 or scales.shape != (expected,):
        raise StateError(
            f"{scale_name(key)} of {name!r} is {TensorSpec.of(scales)}; blocks of {block_format.block} elements need "
            f"f32[{expected}]: compile with the block size that the state was made with"
        )
