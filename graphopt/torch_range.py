"""The versions of torch that graphopt works with. Importing this refuses others, before private parts of torch fail.

pip keeps to the range when it installs graphopt; with ``--no-deps``, or when torch is replaced later, nobody asks it.
"""

from __future__ import annotations

import torch

OLDEST = (2, 11)
FIRST_UNKNOWN = (2, 15)


def refuse_other_torch(found: str) -> None:
    """Raise ImportError unless ``found``, the version of torch, is in the range."""
    major, minor = found.split(".")[:2]
    if OLDEST <= (int(major), int(minor)) < FIRST_UNKNOWN:
        return
    wanted = "torch>={}.{},<{}.{}".format(*OLDEST, *FIRST_UNKNOWN)
    raise ImportError(
        f"graphopt needs {wanted}: it uses parts of torch that differ between versions; found torch {found}. "
        f"Install another: pip install '{wanted}'"
    )


refuse_other_torch(torch.__version__)
