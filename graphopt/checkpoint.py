"""Checkpoint policies as values: which values of the forward part are not kept for the backward part.

``EveryN(4)``, ``SqrtN()``, ``Segments(5)`` and ``Manual([...])`` compute values again; ``Offload()`` moves kept ones to
host memory. ``SqrtN() + Offload()`` does both: what the first does not drop, the second moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from graphopt.errors import UnsupportedError


@dataclass(frozen=True)
class ValueFacts:
    """What a predicate is told about a value of the forward part.

    ``module``: the path of the module that makes it; ``op``: the operator (``aten.mm.default``); ``spec``: dtype and
    shape (``f32[8,128]``); ``source``: file and line.
    """

    name: str
    module: str
    op: str
    spec: str
    nbytes: int
    source: str


@dataclass(frozen=True)
class Policy:
    """Base of all policies; they are values: compare them, print them, add them."""

    def __add__(self, other: Policy) -> Combined:
        if not isinstance(other, Policy):
            return NotImplemented
        return Combined((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class EveryN(Policy):
    """Of every ``n`` layers only the input is kept; a number above the depth makes one piece of all layers."""

    n: int

    def __post_init__(self) -> None:
        _check_count("EveryN", "n", self.n)


@dataclass(frozen=True)
class Segments(Policy):
    """The layers in ``count`` pieces whose lengths differ by at most one; of each only the input is kept."""

    count: int

    def __post_init__(self) -> None:
        _check_count("Segments", "count", self.count)


@dataclass(frozen=True)
class SqrtN(Policy):
    """The layers in about as many pieces as each piece has layers."""


@dataclass(frozen=True)
class Manual(Policy):
    """What to compute again, by hand.

    ``which``: module paths (``"model.layers.0"`` with all below it; ``*`` matches within a path), each kept at its
    borders only as a checkpoint around that module would, or a predicate of ``ValueFacts`` that is true for values to
    drop. A path that matches nothing is an error when the step is compiled.
    """

    which: tuple[str, ...] | Callable[[ValueFacts], bool]

    def __post_init__(self) -> None:
        if callable(self.which):
            return
        is_list = isinstance(self.which, Iterable) and not isinstance(self.which, (str, bytes))
        names = tuple(self.which) if is_list else (None,)
        if not all(isinstance(name, str) for name in names):
            raise UnsupportedError(
                f"Manual expects a list of module paths or a predicate, came {self.which!r}: write Manual(['...'])"
            )
        if not names:
            raise UnsupportedError("Manual([]) names nothing: leave checkpoint out to keep everything")
        object.__setattr__(self, "which", names)


@dataclass(frozen=True)
class Offload(Policy):
    """Kept values move to host memory and come back before they are used.

    ``prefetch``: how many are on their way back ahead of use. ``host_budget``: the most bytes of host memory (an int or
    text such as ``"8GiB"``; None: no limit); values beyond it stay. ``pin``: page-locked host memory on CUDA, which the
    copies need to overlap with work.
    """

    prefetch: int = 2
    host_budget: int | str | None = None
    pin: bool = True

    def __post_init__(self) -> None:
        _check_count("Offload", "prefetch", self.prefetch)
        if self.host_budget is not None:
            host_bytes(self.host_budget)


@dataclass(frozen=True)
class Combined(Policy):
    """Several policies, one after the other: each decides about what those before it keep."""

    parts: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if sum(isinstance(part, Offload) for part in self.parts) > 1:
            raise UnsupportedError("two Offload policies contradict each other: give one")

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def policy_of(checkpoint: object) -> Policy | None:
    """The Policy that the ``checkpoint`` argument of ``compile`` means: one policy, several in a sequence, or None."""
    if checkpoint is None or isinstance(checkpoint, Policy):
        return checkpoint
    if isinstance(checkpoint, Sequence) and not isinstance(checkpoint, str):
        parts = [part for item in checkpoint for part in _parts(item)]
        if parts and all(isinstance(part, Policy) for part in parts):
            return parts[0] if len(parts) == 1 else Combined(tuple(parts))
    raise UnsupportedError(
        f"checkpoint expects None or a policy such as graphopt.checkpoint.SqrtN(), EveryN(4), Manual([...]) or "
        f"Offload(), or several of them, came {checkpoint!r}"
    )


def policy_parts(policy: Policy | None) -> tuple[Policy, ...]:
    """The single policies that ``policy`` is made of."""
    return () if policy is None else _parts(policy)


def host_bytes(budget: int | str) -> int:
    """A ``host_budget`` in bytes."""
    from graphopt.ir.units import parse_bytes

    return parse_bytes(budget, name="host_budget")


def _parts(policy: Policy) -> tuple[Policy, ...]:
    return policy.parts if isinstance(policy, Combined) else (policy,)


def _check_count(policy: str, name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UnsupportedError(f"{policy} expects {name} to be a whole number from 1 on, came {count!r}")
