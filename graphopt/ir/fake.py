"""Fake tensors, which have a shape and a memory but no content: the values of a Program.

Private torch: ``torch._subclasses.fake_tensor`` (torch 2.11 to 2.14). The IR cannot do without them, so this one file
of it imports them, and everything else of the IR and the passes asks here.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a tensor without content."""
    return isinstance(value, FakeTensor)


__all__ = ["FakeTensor", "FakeTensorMode", "is_fake"]
