"""Calls of the compiled CPU kernels: tables of addresses, scalars as the sources declare them, numbers of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from graphopt.kernels.block_maps import MAPS, tree, tree_edges, tree_steps
from graphopt.kernels.block_update import FLOATS, BlockOptions, FlatItem, Moment
from graphopt.kernels.counter_random import Key
from graphopt.kernels.cpu_library import library
from graphopt.kernels.flat_tensors import num_blocks

# Below this many elements the threads would cost more than they bring: 16384 elements take one thread 20 microseconds.
ELEMENTS_OF_A_THREAD = 1 << 14


@dataclass(frozen=True)
class Fp8Groups:
    """``struct Groups`` of the sources: numbers of a group in each dim, and how many groups lie beside each other."""

    rows: int
    columns: int
    num_columns: int

    @property
    def packed(self) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * 3)(self.rows, self.columns, self.num_columns)


def update(
    name: str, items: Sequence[FlatItem], scalars: Sequence[float], options: BlockOptions, factor: float
) -> bool:
    """Runs the update ``name`` ("adam" or "lion") in place on ``items``; False where nothing is compiled for them."""
    compiled = _library_for(items[0].parameter) if items else None
    if compiled is None:
        return not items
    rows = item_rows(items, options.block)
    table = (ctypes.c_int64 * sum(map(len, rows)))(*chain.from_iterable(rows))
    numbers = (ctypes.c_float * len(scalars))(*scalars)
    choices = (options.block, MAPS.index(options.map), *(int(choice) for choice in astuple(options)[2:]))
    getattr(compiled, f"graphopt_block_{name}")(
        table,
        ctypes.c_int64(len(rows)),
        numbers,
        ctypes.c_float(factor),
        (ctypes.c_int64 * len(choices))(*choices),
        ctypes.c_void_p(trees().data_ptr()),
        _threads(sum(item.parameter.numel() for item in items)),
    )
    return True


def item_rows(items: Sequence[FlatItem], block: int) -> list[tuple[int, ...]]:
    """For each item what ``struct Item`` of the sources holds, as 64-bit integers; empty parameters are left out."""
    rows, first_block = [], 0
    for item in items:
        num_elements = item.parameter.numel()
        if num_elements == 0:
            continue
        pointers = [tensor.data_ptr() for moment in item.moments for tensor in (moment.codes, moment.scales)]
        rows.append(
            (
                item.parameter.data_ptr(),
                item.gradient.data_ptr(),
                *pointers,
                *(0,) * (4 - len(pointers)),
                num_elements,
                first_block,
                FLOATS.index(item.parameter.dtype),
                FLOATS.index(item.gradient.dtype),
                item.key.packed,
                item.offset,
            )
        )
        first_block += num_blocks(num_elements, block)
    return rows


def quantize(values: Tensor, into: Moment, block: int, name: str, draw: tuple[Key, int] | None) -> bool:
    """Fills flat ``into`` from flat f32 ``values``; ``draw``: key and offset of a stochastic rounding of u8 codes."""
    compiled = _library_for(values)
    if compiled is None:
        return False
    arguments = (_address(values), _integer(values.numel()), _integer(block), _integer(MAPS.index(name)))
    targets = (_address(trees()), _address(into.codes), _address(into.scales))
    threads = _threads(values.numel())
    if into.codes.dtype == torch.int8:
        compiled.graphopt_quantize_signed(*arguments, *targets, threads)
        return True
    key, offset = (draw[0].packed, draw[1]) if draw is not None else (0, 0)
    drawn = (_integer(draw is not None), _integer(key), _integer(offset))
    compiled.graphopt_quantize_unsigned(*arguments, *targets, *drawn, threads)
    return True


def dequantize(moment: Moment, values: Tensor, block: int, name: str) -> bool:
    """Fills flat f32 ``values`` from a flat ``moment``; False where nothing is compiled for them."""
    compiled = _library_for(values)
    if compiled is None:
        return False
    compiled.graphopt_dequantize(
        _address(moment.codes),
        _integer(moment.codes.dtype == torch.int8),
        _address(moment.scales),
        _integer(values.numel()),
        _integer(block),
        _integer(MAPS.index(name)),
        _address(trees()),
        _address(values),
        _threads(values.numel()),
    )
    return True


def round_stochastically(values: Tensor, rounded: Tensor, key: Key, offset: int) -> bool:
    """Fills flat bf16 ``rounded`` from flat f32 ``values``; False where nothing is compiled for them."""
    compiled = _library_for(values)
    if compiled is None:
        return False
    compiled.graphopt_round_stochastically(
        _address(values),
        _integer(values.numel()),
        _integer(key.packed),
        _integer(offset),
        _address(rounded),
        _threads(values.numel()),
    )
    return True


def fp8_largest(x: Tensor, groups: Fp8Groups, largest: Tensor) -> bool:
    """Fills f32 ``largest`` [groups] with the largest magnitudes of x [M,K], whose rows are contiguous."""
    compiled = _library_for(x)
    if compiled is None:
        return False
    arguments = (_address(x), _integer(FLOATS.index(x.dtype)), _matrix(x), groups.packed, _address(largest))
    compiled.graphopt_fp8_largest(*arguments, _threads(x.numel()))
    return True


def fp8_encode(x: Tensor, groups: Fp8Groups, factors: Tensor, codes: Tensor) -> bool:
    """Fills ``codes`` [M,K], contiguous or the transpose of contiguous, from x times f32 ``factors`` [groups]."""
    compiled = _library_for(x)
    if compiled is None:
        return False
    compiled.graphopt_fp8_encode(
        _address(x),
        _integer(FLOATS.index(x.dtype)),
        _matrix(x),
        groups.packed,
        _address(factors),
        _integer(codes.dtype == torch.float8_e5m2),
        _address(codes),
        _integer(not codes.is_contiguous()),
        _threads(x.numel()),
    )
    return True


def fp8_decode(codes: Tensor, groups: Fp8Groups, scales: Tensor, values: Tensor) -> bool:
    """Fills ``values`` [M,K], contiguous, from ``codes`` with contiguous rows and f32 ``scales`` [groups]."""
    compiled = _library_for(codes)
    if compiled is None:
        return False
    compiled.graphopt_fp8_decode(
        _address(codes),
        _matrix(codes),
        groups.packed,
        _address(scales),
        _address(fp8_values(codes.dtype)),
        _address(values),
        _integer(FLOATS.index(values.dtype)),
        _threads(codes.numel()),
    )
    return True


@cache
def fp8_values(dtype: torch.dtype) -> Tensor:
    """f32[256]: what each code stands for."""
    return torch.arange(256).to(torch.uint8).view(dtype).float()


@cache
def trees() -> Tensor:
    """f32[1278]: values and edges of the signed tree, then of the unsigned one, and its steps: ``struct Trees``."""
    parts = [table(is_signed=is_signed) for is_signed in (True, False) for table in (tree, tree_edges)]
    return torch.cat((*parts, tree_steps()))


def _library_for(tensor: Tensor) -> ctypes.CDLL | None:
    return library() if tensor.device.type == "cpu" else None


def _threads(num_elements: int) -> ctypes.c_int64:
    return ctypes.c_int64(max(1, min(torch.get_num_threads(), num_elements // ELEMENTS_OF_A_THREAD)))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _matrix(x: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """``struct Matrix`` of the sources."""
    return (ctypes.c_int64 * 3)(x.shape[0], x.shape[1], x.stride(0))


def _integer(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)
