"""The state of one parameter as other optimizers save it, read into moments: tensors, or codes with their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import StateError
from graphopt.ir.spec import TensorSpec
from graphopt.kernels.block_maps import DYNAMIC, tree
from graphopt.kernels.block_quantize import dequantize_reference, quantize_reference
from graphopt.kernels.block_update import Moment
from graphopt.optim.kept_state import STEP, KeptState, memory_order
from graphopt.optim.state import BlockState, scale_name

BITSANDBYTES_NEST = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts the tensors of a state since 0.49."""
BITSANDBYTES_BLOCKS = (256, 2048)
"""Elements of a block now, and before 0.44."""
_SIGNED_SHIFT = 128
"""Codes of bitsandbytes index the signed tree from 0, ours from -128."""


@dataclass(frozen=True)
class CodedMoment:
    """Codes (i8 signed, u8 not; blocks in their own memory order) with f32 scales, and what they mean."""

    codes: torch.Tensor
    scales: torch.Tensor
    format: BlockState

    def decoded(self) -> torch.Tensor:
        """f32, laid out like the codes."""
        return dequantize_reference(Moment(self.codes, self.scales), block=self.format.block, map=self.format.map)


@dataclass(frozen=True)
class SavedMoments:
    """State of one parameter: moments by their names in ``torch.optim``, and updates so far (None: not said)."""

    moments: Mapping[str, torch.Tensor | CodedMoment]
    step: float | None


def read_moments(
    name: str,
    values: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    names: tuple[str, ...],
    parameter: TensorSpec,
) -> SavedMoments:
    """The moments ``names`` of the parameter ``name`` out of a saved state of torch, bitsandbytes or graphopt.

    ``record``: what graphopt saved about codes. Raises StateError for what is missing or has another shape or dtype.
    """
    flat = {**values, **values.get(BITSANDBYTES_NEST, {})}
    flat.pop(BITSANDBYTES_NEST, None)
    if "state1" in flat:
        moments = _of_bitsandbytes(name, flat, names, parameter)
    else:
        moments = _of_torch(name, flat, record, names, parameter)
    return SavedMoments(moments, _step(name, flat.get(STEP)))


def encoded(
    moment: torch.Tensor | CodedMoment, key: str, like: torch.Tensor, kept: KeptState
) -> dict[str, torch.Tensor]:
    """The state tensors that keep ``moment`` as state ``key`` of the parameter ``like``, in the format of ``kept``.

    Codes of the same map, block and order in memory are taken as they are; others are decoded and rounded to nearest.
    """
    spec, block_format = kept.specs[key], kept.block_format
    if block_format is None:
        wide = moment.decoded() if isinstance(moment, CodedMoment) else moment
        return {key: torch.empty_like(like, dtype=spec.dtype, requires_grad=False).copy_(wide)}
    if isinstance(moment, CodedMoment) and moment.format == block_format and _lies_like(moment.codes, like):
        codes = torch.empty_like(like, dtype=spec.dtype, requires_grad=False).copy_(moment.codes)
        return {key: codes, scale_name(key): moment.scales.to(like.device, copy=True)}
    wide = moment.decoded() if isinstance(moment, CodedMoment) else moment
    laid_out = torch.empty_like(like, dtype=torch.float32, requires_grad=False).copy_(wide)
    made = quantize_reference(
        laid_out, block=block_format.block, map=block_format.map, is_signed=spec.dtype == torch.int8
    )
    return {key: made.codes, scale_name(key): made.scales}


def _lies_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    return memory_order(TensorSpec.of(tensor)) == memory_order(TensorSpec.of(like))


def _of_torch(
    name: str,
    values: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    names: tuple[str, ...],
    parameter: TensorSpec,
) -> dict[str, torch.Tensor | CodedMoment]:
    if "max_exp_avg_sq" in values:
        raise StateError(
            f"the state of {name!r} is that of amsgrad, which has no counterpart here: train on without it first"
        )
    found: dict[str, torch.Tensor | CodedMoment] = {}
    for key in names:
        value = values.get(key)
        if value is None and key == "momentum_buffer":
            continue
        if not isinstance(value, torch.Tensor):
            raise StateError(
                f"the saved state of {name!r} has no {key}, there are {sorted(map(str, values))}: it is that of "
                "another optimizer than this step's"
            )
        found[key] = _moment(name, key, value, values.get(scale_name(key)), record, parameter)
    return found


def _moment(
    name: str,
    key: str,
    value: torch.Tensor,
    scales: Any,
    record: Mapping[str, Any] | None,
    parameter: TensorSpec,
) -> torch.Tensor | CodedMoment:
    _check_shape(name, key, value, parameter)
    if value.is_floating_point() or value.is_complex():
        _check_sign(name, key, value)
        return value
    if value.dtype not in (torch.int8, torch.uint8) or record is None:
        raise StateError(
            f"{key} of {name!r} is {TensorSpec.of(value)}, without a record of what its codes mean: expected floats, "
            "or what step.optimizer.state_dict() of graphopt gives, whole"
        )
    block_format = BlockState(int(record["block"]), str(record["map"]))
    order = list(record["order"])
    if list(memory_order(TensorSpec.of(value))) != order:
        value = _in_order(value, order)
    _check_scales(name, key, scales, value.numel(), (block_format.block,))
    return CodedMoment(value, scales, block_format)


def _in_order(value: torch.Tensor, order: list[int]) -> torch.Tensor:
    """``value`` with its dimensions in memory in ``order``, those of one element first."""
    slowest_first = [*(d for d in range(value.dim()) if d not in order), *order]
    back = [slowest_first.index(d) for d in range(value.dim())]
    return value.permute(slowest_first).contiguous().permute(back)


def _of_bitsandbytes(
    name: str, values: Mapping[str, Any], names: tuple[str, ...], parameter: TensorSpec
) -> dict[str, torch.Tensor | CodedMoment]:
    num_saved = 2 if isinstance(values.get("state2"), torch.Tensor) else 1
    if len(names) != num_saved:
        raise StateError(
            f"the saved state of {name!r} has {num_saved} moments, this step keeps {len(names)} "
            f"({', '.join(names)}): it is that of another optimizer"
        )
    return {
        key: _bitsandbytes_moment(name, values, position, is_signed=position == 1, parameter=parameter)
        for position, key in enumerate(names, start=1)
    }


def _bitsandbytes_moment(
    name: str, values: Mapping[str, Any], position: int, *, is_signed: bool, parameter: TensorSpec
) -> torch.Tensor | CodedMoment:
    key = f"state{position}"
    value, table, scales = values[key], values.get(f"qmap{position}"), values.get(f"absmax{position}")
    _check_shape(name, key, value, parameter)
    if value.is_floating_point():
        if not is_signed:
            _check_sign(name, key, value)
        return value
    if value.dtype != torch.uint8 or not isinstance(table, torch.Tensor) or not isinstance(scales, torch.Tensor):
        raise StateError(
            f"{key} of {name!r} is {TensorSpec.of(value)}; expected float32, or uint8 codes with qmap{position} and "
            f"absmax{position} by blocks (state with one scale a tensor is older than bitsandbytes 0.44: not supported)"
        )
    block = _check_scales(name, f"absmax{position}", scales, value.numel(), BITSANDBYTES_BLOCKS)
    if torch.equal(table.cpu(), tree(is_signed=is_signed)):
        codes = (value.to(torch.int16) - _SIGNED_SHIFT).to(torch.int8) if is_signed else value
        return CodedMoment(codes, scales, BlockState(block, DYNAMIC))
    if table.shape != (256,) or not table.is_floating_point():
        raise StateError(f"qmap{position} of {name!r} is {TensorSpec.of(table)}; expected a table f32[256]")
    return _looked_up(value, table, scales, block)


def _looked_up(codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """f32 that codes of another table than ours stand for."""
    order = list(memory_order(TensorSpec.of(codes)))
    slowest_first = [*(d for d in range(codes.dim()) if d not in order), *order]
    lying = codes.permute(slowest_first)
    flat = table.float()[lying.reshape(-1).long()]
    wide = flat * scales.repeat_interleave(block)[: codes.numel()]
    return wide.view(lying.shape).permute([slowest_first.index(d) for d in range(codes.dim())])


def _check_shape(name: str, key: str, value: torch.Tensor, parameter: TensorSpec) -> None:
    if tuple(value.shape) != tuple(parameter.shape):
        raise StateError(
            f"saved {key} of {name!r} has shape {list(value.shape)}, the parameter {list(parameter.shape)}: are the "
            "parameters in the same order as when it was saved?"
        )


def _check_sign(name: str, key: str, value: torch.Tensor) -> None:
    if key in ("exp_avg_sq", "state2") and bool((value < 0).any()):
        raise StateError(f"saved {key} of {name!r} has elements below 0, which no average of squares has")


def _check_scales(name: str, key: str, scales: Any, num_elements: int, blocks: tuple[int, ...]) -> int:
    """The block size that the number of scales fits; StateError if none of ``blocks`` does."""
    if isinstance(scales, torch.Tensor) and scales.dtype == torch.float32:
        for block in blocks:
            if scales.shape == (-(-num_elements // block),):
                return block
    came = TensorSpec.of(scales) if isinstance(scales, torch.Tensor) else type(scales).__name__
    expected = " or ".join(f"f32[{-(-num_elements // block)}] (blocks of {block})" for block in blocks)
    raise StateError(f"scales of {key} of {name!r}: expected {expected}, came {came}")


def _step(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise StateError(f"the saved step of {name!r} has shape {list(value.shape)}, expected one number")
    count = float(value)
    if count < 0:
        raise StateError(f"the saved step of {name!r} is {count}, expected a count from 0 on")
    return count
