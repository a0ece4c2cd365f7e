"""One launch for a list of parameters: the table that a program finds its parameter in, and its loads and stores.

A program works on one tile: ``BLOCKS`` blocks of one parameter. ``tile_items[program]`` is the row of the parameter in
the table (``cpu_calls.item_rows``, with numbers of tiles instead of blocks), so that a program reads two small things
before it starts. Addresses, sizes and offsets are 64 bits. Whole tiles of parameters that lie on 16 bytes are read
and written in wide words without a mask; ragged last tiles, and all tiles of a launch with a parameter that lies askew,
with one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.kernels.block_maps_triton import nearest_bfloat16, stochastic_bfloat16
from graphopt.kernels.block_update import FLOATS

NUM_FIELDS = tl.constexpr(12)
FLOAT32 = tl.constexpr([str(dtype) for dtype in FLOATS].index("torch.float32"))
BFLOAT16 = tl.constexpr([str(dtype) for dtype in FLOATS].index("torch.bfloat16"))


@triton.jit
def field(row_ptr, number: tl.constexpr):
    return tl.load(row_ptr + number)


@triton.jit
def typed(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that an address is; ALIGNED promises 16 bytes."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_tile(address, element, mask, dtype: tl.constexpr, MASKED: tl.constexpr):
    pointers = typed(address, dtype, not MASKED) + element
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    return tl.load(pointers)


@triton.jit
def store_tile(address, element, mask, values, dtype: tl.constexpr, MASKED: tl.constexpr):
    pointers = typed(address, dtype, not MASKED) + element
    if MASKED:
        tl.store(pointers, values, mask=mask)
    else:
        tl.store(pointers, values)


@triton.jit
def load_floats(address, element, mask, dtype, MASKED: tl.constexpr):
    """f32 tile of a float tensor whose dtype is known when the kernel runs."""
    if dtype == FLOAT32:
        values = load_tile(address, element, mask, tl.float32, MASKED)
    elif dtype == BFLOAT16:
        values = load_tile(address, element, mask, tl.bfloat16, MASKED).to(tl.float32)
    else:
        values = load_tile(address, element, mask, tl.float16, MASKED).to(tl.float32)
    return values


@triton.jit
def store_floats(address, element, mask, values, bits, dtype, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr):
    """Writes f32 ``values`` as the float that ``dtype`` says when the kernel runs; STOCHASTIC: by ``bits`` u32."""
    if dtype == FLOAT32:
        store_tile(address, element, mask, values, tl.float32, MASKED)
    elif dtype == BFLOAT16:
        if STOCHASTIC:
            store_tile(address, element, mask, stochastic_bfloat16(values, bits), tl.bfloat16, MASKED)
        else:
            store_tile(address, element, mask, nearest_bfloat16(values), tl.bfloat16, MASKED)
    else:
        store_tile(address, element, mask, values.to(tl.float16), tl.float16, MASKED)


@triton.jit
def load_scales(scales_ptr, blocks, num_blocks):
    return tl.load(scales_ptr + blocks, mask=blocks < num_blocks, other=0.0)


@triton.jit
def store_scales(scales_ptr, blocks, num_blocks, scales):
    tl.store(scales_ptr + blocks, scales, mask=blocks < num_blocks)
