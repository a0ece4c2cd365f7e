"""What the updates of block-INT8 optimizers share: which parameters one launch works on, how, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.kernels.block_maps import check_map
from graphopt.kernels.counter_random import Key, key_of
from graphopt.kernels.flat_tensors import check_block, flat, flat_like, has_layout_of, num_blocks

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelSpec:
    """An update as a kernel: its name, how many 8-bit moments it keeps, and the bytes that it cannot but move."""

    name: str
    num_moments: int

    def floor_bytes(self, num_elements: int, block: int, *, parameter_bytes: int, gradient_bytes: int) -> int:
        """Parameter and state read and written once, gradient read once, for elements of so many bytes."""
        element_bytes = 2 * parameter_bytes + gradient_bytes + 2 * self.num_moments
        return num_elements * element_bytes + num_blocks(num_elements, block) * 2 * 4 * self.num_moments


@dataclass(frozen=True)
class Moment:
    """8-bit codes in the layout of their parameter, and f32 scales, one a block of the parameter's memory."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class BlockItem:
    """One parameter of a launch: all that is written (``parameter``, ``moments``) and the gradient.

    parameter, gradient: f32, bf16 or f16, one shape. ``seed`` and ``offset`` name the random numbers of its elements:
    ``offset`` is where this piece begins in the whole parameter.
    """

    parameter: Tensor
    gradient: Tensor
    moments: tuple[Moment, ...]
    seed: int = 0
    offset: int = 0


@dataclass(frozen=True)
class BlockOptions:
    """How a launch works on each of its parameters; a value of these may have a kernel of its own.

    ``block`` elements share a scale in ``map``; ``decoupled``: decay of the weights, not through the gradient;
    ``stochastic_state``: second moments are rounded stochastically; ``stochastic_weight``: bf16 parameters are (f32
    ones have nothing to round, f16 ones are refused).
    """

    block: int
    map: str
    decoupled: bool
    stochastic_state: bool = False
    stochastic_weight: bool = False


@dataclass(frozen=True)
class FlatItem:
    """A BlockItem flat, in the memory order of its parameter, with its key of this step."""

    parameter: Tensor
    gradient: Tensor
    moments: tuple[Moment, ...]
    key: Key
    offset: int


def flat_items(items: Sequence[BlockItem], options: BlockOptions, step: float) -> tuple[FlatItem, ...]:
    """``items`` checked and flat. Raises TypeError for dtypes, ValueError for shapes, layouts and devices."""
    check_block(options.block)
    check_map(options.map)
    return tuple(_flat_item(item, options, step) for item in items)


def is_skipped(factor: Tensor | None) -> bool:
    """Whether ``factor`` says that this step writes nothing; reads its value, on CUDA waiting for the device."""
    return factor is not None and not bool(torch.isfinite(factor))


def rounded(*numbers: float) -> tuple[float, ...]:
    """``numbers`` as float32 holds them."""
    layout = f"{len(numbers)}f"
    return struct.unpack(layout, struct.pack(layout, *numbers))


def _flat_item(item: BlockItem, options: BlockOptions, step: float) -> FlatItem:
    parameter = item.parameter
    _check_floats(item, options)
    flat_parameter = flat(parameter)
    for moment, dtype in zip(item.moments, (torch.int8, torch.uint8), strict=False):
        _check_moment(moment, parameter, dtype, options.block)
    return FlatItem(
        flat_parameter,
        flat_like(item.gradient, parameter),
        tuple(Moment(flat(moment.codes), flat(moment.scales)) for moment in item.moments),
        key_of(item.seed, step),
        item.offset,
    )


def _check_floats(item: BlockItem, options: BlockOptions) -> None:
    parameter, gradient = item.parameter, item.gradient
    for role, tensor in (("parameter", parameter), ("gradient", gradient)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"expected a {role} in float32, bfloat16 or float16, got {tensor.dtype}; convert it first")
    if parameter.dtype == torch.float16 and options.stochastic_weight:
        raise TypeError(
            "stochastic rounding of weights writes bfloat16, and this parameter is float16; keep the parameter in "
            "bfloat16 or in float32, or round to nearest"
        )
    if gradient.shape != parameter.shape or gradient.device != parameter.device:
        raise ValueError(
            f"expected a gradient like its parameter ({tuple(parameter.shape)} on {parameter.device}), got "
            f"{tuple(gradient.shape)} on {gradient.device}"
        )


def _check_moment(moment: Moment, parameter: Tensor, dtype: torch.dtype, block: int) -> None:
    codes, scales = moment.codes, moment.scales
    if codes.dtype != dtype or scales.dtype != torch.float32:
        raise TypeError(
            f"expected codes in {dtype} with scales in float32, got {codes.dtype} and {scales.dtype}; a state dict "
            "loaded with dtypes changed does this: load it with the dtypes that were saved"
        )
    if codes.shape != parameter.shape or not has_layout_of(codes, parameter):
        raise ValueError(
            f"expected codes of the shape and strides of their parameter ({tuple(parameter.shape)}, "
            f"{parameter.stride()}), got {tuple(codes.shape)}, {codes.stride()}; make them with "
            f"torch.empty_like(parameter, dtype={dtype})"
        )
    expected = num_blocks(parameter.numel(), block)
    if scales.shape != (expected,):
        raise ValueError(
            f"expected {expected} scales for {parameter.numel()} elements in blocks of {block}, got shape "
            f"{tuple(scales.shape)}; the state was made with another block size"
        )
    if codes.device != parameter.device or scales.device != parameter.device:
        raise ValueError(f"expected state on {parameter.device}, got {codes.device} and {scales.device}")
