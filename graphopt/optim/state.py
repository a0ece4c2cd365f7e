"""What an optimizer keeps for a parameter: formats, the tensors they consist of, and who gets which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from graphopt.errors import UnsupportedError
from graphopt.ir.spec import TensorSpec
from graphopt.kernels.flat_tensors import MOST_ELEMENTS_OF_A_BLOCK

DEFAULT_BLOCK = 256
MAPS = ("companded", "linear", "dynamic")


class Initial(StrEnum):
    """What a state tensor holds before the first update."""

    ZEROS = "zeros"
    PARAMETER = "parameter"


class Weights(StrEnum):
    """How a parameter in bfloat16 or float16 is updated without losing what is smaller than its last digit.

    OWN: in its own dtype, as torch does. MASTER: a float32 copy is updated and cast back. STOCHASTIC: the float32
    result is rounded up or down by chance, right on average. REMAINDER: 16 more bits are kept, which make bfloat16
    float32.
    """

    OWN = "none"
    MASTER = "fp32"
    STOCHASTIC = "stochastic"
    REMAINDER = "remainder"


@dataclass(frozen=True)
class StateSlot:
    """One state tensor of a parameter: its elements in ``dtype`` (None: the dtype it is updated in), or with
    ``block`` one number for every ``block`` of them.
    """

    name: str
    dtype: torch.dtype | None = None
    block: int | None = None
    initial: Initial = Initial.ZEROS

    def spec(self, parameter: TensorSpec) -> TensorSpec:
        """The spec for a parameter that is updated as ``parameter``."""
        if self.block is not None:
            num_blocks = -(-parameter.numel // self.block)
            return TensorSpec((num_blocks,), torch.float32, (1,), parameter.device)
        return TensorSpec(parameter.shape, self.dtype or parameter.dtype, parameter.stride, parameter.device)


@dataclass(frozen=True)
class PlainState:
    """State of the parameter's shape in ``dtype`` (None: that of the parameter, as torch keeps it)."""

    dtype: torch.dtype | None = None

    def slots(self, names: tuple[str, ...], unsigned: frozenset[str]) -> tuple[StateSlot, ...]:
        """One tensor for each name."""
        return tuple(StateSlot(name, self.dtype) for name in names)

    def __str__(self) -> str:
        return "as the parameter" if self.dtype is None else str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class BlockState:
    """State in one byte an element, with one float32 scale for every ``block`` of them; see ``kernels``."""

    block: int = DEFAULT_BLOCK
    map: str = "companded"

    def slots(self, names: tuple[str, ...], unsigned: frozenset[str]) -> tuple[StateSlot, ...]:
        """Codes and scales for each name; uint8 for those that are never negative."""
        found = []
        for name in names:
            found.append(StateSlot(name, torch.uint8 if name in unsigned else torch.int8))
            found.append(StateSlot(scale_name(name), block=self.block))
        return tuple(found)

    def __str__(self) -> str:
        return f"int8 by blocks of {self.block}, {self.map}"


StateFormat = PlainState | BlockState

AS_TORCH = PlainState()


def scale_name(name: str) -> str:
    """The state that holds the scales of the codes ``name``."""
    return f"{name}_scale"


@dataclass(frozen=True)
class ParameterFacts:
    """What decides about the state of a parameter: its whole spec, and whether rows of it are looked up."""

    spec: TensorSpec
    is_embedding: bool = False


@dataclass(frozen=True)
class StateChoice:
    """The format of a parameter's state, with the reason for it."""

    format: StateFormat
    reason: str


@dataclass(frozen=True)
class BlockRule:
    """Which parameters get block state: whole ones of at least ``min_size`` elements and two dimensions, and embedding
    tables only if asked for. Tied parameters are one; how a parameter is sharded does not matter.
    """

    format: BlockState
    min_size: int
    embeddings: bool

    def choice(self, facts: ParameterFacts) -> StateChoice:
        """The StateChoice for a parameter."""
        plain = PlainState(torch.float32)
        if facts.spec.numel < self.min_size:
            return StateChoice(plain, f"fewer than {self.min_size} elements")
        if len(facts.spec.shape) < 2:
            return StateChoice(plain, "one dimension")
        if facts.is_embedding and not self.embeddings:
            return StateChoice(plain, "an embedding table: updates of rare rows need more digits")
        return StateChoice(self.format, f"{facts.spec.numel} elements")


PLAIN_FORMATS: dict[str, PlainState] = {
    "parameter": PlainState(),
    "fp32": PlainState(torch.float32),
    "bf16": PlainState(torch.bfloat16),
}


def checked_state(state: Any, allowed: tuple[str, ...]) -> str:
    """``state`` if it is one of ``allowed``; UnsupportedError otherwise."""
    if state not in allowed:
        raise UnsupportedError(f"state expects one of {', '.join(map(repr, allowed))}, came {state!r}")
    return str(state)


def checked_block_format(block: Any, map_name: Any) -> BlockState:
    """The BlockState of an optimizer's options; UnsupportedError for a block or a map that does not exist."""
    is_whole = isinstance(block, int) and not isinstance(block, bool)
    if not is_whole or not 1 <= block <= MOST_ELEMENTS_OF_A_BLOCK:
        raise UnsupportedError(
            f"block expects a whole number of elements from 1 to {MOST_ELEMENTS_OF_A_BLOCK}, came {block!r}"
        )
    if map_name not in MAPS:
        raise UnsupportedError(f"map expects one of {', '.join(map(repr, MAPS))}, came {map_name!r}")
    return BlockState(block, map_name)
