"""Bytes and seconds as people read them."""

from __future__ import annotations

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
