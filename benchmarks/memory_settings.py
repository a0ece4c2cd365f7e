"""Checkpoint policies and byte budgets as text on the command line: ``every-1,sqrt-n``, ``2GiB,0.8``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from graphopt.checkpoint import EveryN, Offload, Policy, Segments, SqrtN, policy_of
from graphopt.errors import DataError, GraphoptError
from graphopt.ir.units import parse_bytes

_COUNTED = {"every": EveryN, "segments": Segments}
_PLAIN = {"sqrt-n": SqrtN, "offload": Offload}
_POLICIES = "every-N, segments-N, sqrt-n, offload, joined with + such as sqrt-n+offload"
_SHARE = re.compile(r"\d+\.\d*|\.\d+|\d+/\d+")


@dataclass(frozen=True)
class MemorySetting:
    """How a step is told to use memory. ``options``: the arguments of ``graphopt.compile`` that say so."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def checkpoint_settings(text: str | None) -> tuple[MemorySetting, ...]:
    """The settings of a list such as ``every-1,sqrt-n``; DataError for what is no policy."""
    return tuple(policy_setting(_policy(part)) for part in split_list(text))


def memory_settings(text: str | None) -> tuple[MemorySetting, ...]:
    """The settings of a list such as ``2GiB,0.8``; numbers with a point or a stroke are shares of the whole step."""
    return tuple(MemorySetting(f"memory={part}", {"memory": _budget(part)}) for part in split_list(text))


def policy_setting(policy: Policy) -> MemorySetting:
    """The setting of one policy, under the name that it prints as."""
    return MemorySetting(str(policy), {"checkpoint": policy})


def split_list(text: str | None) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(filter(None, (part.strip() for part in (text or "").split(","))))


def _policy(text: str) -> Policy:
    policy = policy_of([_single_policy(part, text) for part in text.split("+")])
    assert policy is not None, "a list with parts is a policy"
    return policy


def _single_policy(part: str, text: str) -> Policy:
    if part in _PLAIN:
        return _PLAIN[part]()
    name, _, count = part.rpartition("-")
    if name in _COUNTED and count.isdigit() and int(count):
        return _COUNTED[name](int(count))
    raise DataError(f"--checkpoint expects {_POLICIES}; came {text!r}")


def _budget(text: str) -> int | Fraction:
    try:
        if _SHARE.fullmatch(text):
            share = Fraction(text)
            if share:
                return share
        return parse_bytes(text)
    except (GraphoptError, ZeroDivisionError) as error:
        raise DataError(f"--memory expects bytes such as 2GiB or shares such as 0.8; came {text!r}") from error
