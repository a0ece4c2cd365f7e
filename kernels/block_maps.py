"""How a block of float32 moments becomes 8-bit codes and one scale, and back: the maps, in plain torch.

``s`` is the largest magnitude of the block, stored as it is: no floor. With ``r = |x| / s``:

=========== ================================ ================================= =====================================
map         first moment (i8)                 second moment (u8)                decoded
=========== ================================ ================================= =====================================
companded   sign(x) round(127 sqrt(r))        max(1, round(255 r^(1/4))), x > 0  s c|c| / 127^2;  s (c^2 / 255^2)^2
linear      sign(x) round(127 r)              round(255 r)                      s c / 127;  s c / 255
dynamic     nearest of the signed tree - 128  nearest of the unsigned tree      s tree[c]
=========== ================================ ================================= =====================================

Zero is exactly representable in each, the block's largest magnitude too (in ``dynamic``, whose tree holds 1 and not -1,
where it is positive). A block of zeros has scale 0 and codes 0. A block that holds inf or NaN has scale NaN and codes
0: it decodes to NaN, so that a broken moment shows instead of vanishing. Rounding is to nearest, or for second moments
stochastic, in code space: ``floor(c + u)``. Every operation is one float32 operation, rounded once, in this order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from graphopt.kernels.exact_root import exact_root

COMPANDED = "companded"
LINEAR = "linear"
DYNAMIC = "dynamic"
MAPS = (COMPANDED, LINEAR, DYNAMIC)

# Codes and what undoes them. In float32 each largest code times its inverse is exactly 1, so the maximum survives.
SIGNED_CODES = 127.0
UNSIGNED_CODES = 255.0
PER_SIGNED_CODE = float.fromhex("0x1.020408p-7")  # 1 / 127
PER_SIGNED_SQUARE = float.fromhex("0x1.040c2p-14")  # 1 / 127^2
PER_UNSIGNED_CODE = float.fromhex("0x1.010102p-8")  # 1 / 255
PER_UNSIGNED_SQUARE = float.fromhex("0x1.020304p-16")  # 1 / 255^2

_MAGNITUDE_BITS = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_SMALLEST_DECADE = 6  # the tree's levels are 10^-6 to 1


def check_map(name: str) -> None:
    """Raises ValueError for a map that does not exist."""
    if name not in MAPS:
        raise ValueError(f"a map of codes is one of {', '.join(MAPS)}, not {name!r}")


def block_scales(values: Tensor) -> Tensor:
    """f32[blocks]: the largest magnitude of each row of ``values`` f32[blocks, elements]; NaN where one is not finite.

    Magnitudes are compared as integers, which orders floats, puts NaN on top and is the same on every machine.
    """
    bits = (values.view(torch.int32) & _MAGNITUDE_BITS).amax(dim=1)
    return torch.where(bits < _INFINITY_BITS, bits.view(torch.float32), torch.nan)


def encode_signed(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes i8[blocks, elements] and scales f32[blocks] of ``values`` f32[blocks, elements], rounded to nearest."""
    scales = block_scales(values)
    is_live = (scales > 0)[:, None]
    if name == DYNAMIC:
        ratio = _ratio(values, scales)
        codes = torch.bucketize(ratio, tree_edges(is_signed=True).to(values.device), out_int32=True) - 128
    elif name == LINEAR:
        codes = torch.round(_ratio(values, scales) * SIGNED_CODES)
    else:
        codes = torch.copysign(torch.round(_ratio_of_roots(values.abs(), scales) * SIGNED_CODES), values)
    return torch.where(is_live, codes, 0).to(torch.int8), scales


def decode_signed(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """f32[blocks, elements] that i8 ``codes`` and ``scales`` f32[blocks] stand for."""
    if name == DYNAMIC:
        return tree(is_signed=True).to(codes.device)[codes.to(torch.int64) + 128] * scales[:, None]
    wide = codes.to(torch.float32)
    if name == LINEAR:
        return wide * PER_SIGNED_CODE * scales[:, None]
    return wide * wide.abs() * PER_SIGNED_SQUARE * scales[:, None]


def encode_unsigned(values: Tensor, name: str, draw: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes u8[blocks, elements] and scales f32[blocks] of ``values`` f32[blocks, elements], none below 0.

    ``draw``: f32[blocks, elements] uniform in [0, 1) rounds stochastically; None to nearest.
    """
    scales = block_scales(values)
    is_live = (scales > 0)[:, None]
    if name == DYNAMIC:
        ratio = _ratio(values, scales)
        codes = _nearest_of_tree(ratio) if draw is None else _drawn_of_tree(ratio, draw)
    else:
        root = _ratio(values, scales) if name == LINEAR else exact_root(_ratio_of_roots(values, scales))
        place = root * UNSIGNED_CODES
        codes = torch.round(place) if draw is None else torch.floor(place + draw)
        codes = codes.clamp(max=UNSIGNED_CODES)
        if name == COMPANDED:
            codes = torch.where(values > 0, codes.clamp(min=1.0), codes)
    return torch.where(is_live, codes, 0).to(torch.uint8), scales


def decode_unsigned(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """f32[blocks, elements] that u8 ``codes`` and ``scales`` f32[blocks] stand for."""
    if name == DYNAMIC:
        return tree(is_signed=False).to(codes.device)[codes.to(torch.int64)] * scales[:, None]
    wide = codes.to(torch.float32)
    if name == LINEAR:
        return wide * PER_UNSIGNED_CODE * scales[:, None]
    root = wide * wide * PER_UNSIGNED_SQUARE
    return root * root * scales[:, None]


@cache
def tree(*, is_signed: bool) -> Tensor:
    """f32[256], ascending: the dynamic tree of bitsandbytes 0.49 (``functional.create_dynamic_map``).

    Seven decades from 1e-6 to 1; a decade holds twice as many linear fractions as the one below, the unsigned tree
    twice as many as the signed one; and 0 and 1. The signed tree holds each fraction with both signs.
    """
    values = [0.0, 1.0]
    for decade in range(_SMALLEST_DECADE + 1):
        num_fractions = 2**decade * (1 if is_signed else 2)
        edges = torch.linspace(0.1, 1, num_fractions + 1, dtype=torch.float32)
        means = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - _SMALLEST_DECADE)).tolist()
        values += means
        if is_signed:
            values += [-value for value in means]
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def tree_edges(*, is_signed: bool) -> Tensor:
    """f32[255]: half way between neighbours of the tree; a value on an edge takes the smaller neighbour."""
    values = tree(is_signed=is_signed)
    return (values[:-1] + values[1:]) * 0.5


@cache
def tree_steps() -> Tensor:
    """f32[256]: from each value of the unsigned tree to the next; the last, which has none, is 1."""
    values = tree(is_signed=False)
    return torch.cat((values[1:] - values[:-1], torch.ones(1)))


def _nearest_of_tree(ratio: Tensor) -> Tensor:
    return torch.bucketize(ratio, tree_edges(is_signed=False).to(ratio.device), out_int32=True)


def _drawn_of_tree(ratio: Tensor, draw: Tensor) -> Tensor:
    """The neighbour below, or the one above with the probability that is the way to it."""
    values = tree(is_signed=False).to(ratio.device)
    below = (torch.bucketize(ratio, values, right=True) - 1).clamp(max=255)
    way = (ratio - values[below]) / tree_steps().to(ratio.device)[below]
    return (below + torch.floor(way + draw).to(torch.int64)).clamp(max=255)


def _ratio(values: Tensor, scales: Tensor) -> Tensor:
    """``values / scale``, and ``values`` in blocks without a usable scale."""
    return values / torch.where(scales > 0, scales, 1.0)[:, None]


def _ratio_of_roots(values: Tensor, scales: Tensor) -> Tensor:
    """``sqrt(values / scale)`` as ``sqrt(values) * (1 / sqrt(scale))``, for values that are not below 0.

    One division a block. The inverse of a root overflows for no scale, the smallest subnormal included. The largest of
    a block comes out within a unit in the last place of 1: it rounds to the largest code, and its root is exactly 1.
    """
    return exact_root(values) * (1.0 / exact_root(torch.where(scales > 0, scales, 1.0)))[:, None]
