"""Bytes and seconds as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

from graphopt.errors import UnsupportedError

_STEP = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """``num_bytes`` with three digits in the largest unit that keeps it at 1 or above: ``1.50 MiB``."""
    if abs(num_bytes) < _STEP:
        return f"{num_bytes} B"
    size, unit = float(num_bytes), 0
    while abs(size) >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    digits = max(0, 3 - len(str(int(abs(size)))))
    return f"{size:.{digits}f} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """``seconds`` as milliseconds below one second: ``12.3 ms``, ``1.25 s``."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_microseconds(seconds: float) -> str:
    """``seconds`` in microseconds, whatever their size: ``12.3 us``, to be compared with one another."""
    return f"{seconds * 1e6:,.1f} us"


_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_FACTORS = {
    **{unit.lower(): _STEP**power for power, unit in enumerate(_UNITS)},
    **{unit.lower(): 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    "": 1,
}


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """``"2GiB"``, ``"1.5 GB"``, ``"800MiB"`` or a whole number as bytes; UnsupportedError names ``name`` otherwise."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    num_bytes = 0
    if match is not None and match["unit"].lower() in _FACTORS:
        num_bytes = int(Fraction(match["number"]) * _FACTORS[match["unit"].lower()])
    if num_bytes <= 0:
        raise UnsupportedError(f"{name} expects bytes as a whole number or text such as '2GiB', came {size!r}")
    return num_bytes
