"""What a value of a Program was inferred from, so that a value that still holds is not inferred again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.spec import TensorSpec

# Arguments that are compared by what they say; all others, fake values above all, by being the same object.
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Inference:
    """``target`` gave ``value`` for the operands ``reads``; ``is_fresh``: the value shares no memory with them."""

    target: Any
    reads: tuple[Any, ...]
    value: Any
    is_fresh: bool

    @classmethod
    def of(cls, node: fx.Node, value: Any) -> Inference:
        """That ``node``, with the operator and the operands it has, gave ``value``."""
        reads = tuple(_operands((node.args, node.kwargs)))
        return cls(node.target, reads, value, _storages(reads).isdisjoint(_storages((value,))))

    def holds(self, node: fx.Node) -> bool:
        """Whether ``node`` still has this value, this operator and these operands."""
        if node.target is not self.target or node.meta.get("val") is not self.value:
            return False
        reads = tuple(_operands((node.args, node.kwargs)))
        return len(reads) == len(self.reads) and all(map(_is_same, reads, self.reads))

    def after(self, earlier: Inference | None) -> Inference:
        """This one; with the earlier value where that is as good, so that what reads it need not be inferred again."""
        if earlier is None or not (earlier.is_fresh and self.is_fresh) or facts(earlier.value) != facts(self.value):
            return self
        return replace(self, value=earlier.value)


def facts(value: Any) -> Any:
    """What inference says of a value: shape, dtype, stride and device of each tensor, the type of all else."""
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(facts(item) for item in value)
    return type(value)


def _operands(argument: Any) -> Iterator[Any]:
    """What ``argument`` holds in order: the values of nodes, plain values, and the sizes of what they lie in."""
    if isinstance(argument, fx.Node):
        yield argument.meta["val"]
    elif isinstance(argument, (tuple, list)):
        yield len(argument)
        for item in argument:
            yield from _operands(item)
    elif isinstance(argument, dict):
        for key, item in argument.items():
            yield key
            yield from _operands(item)
    else:
        yield argument


def _is_same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and isinstance(left, _PLAIN) and left == right)


def _storages(values: tuple[Any, ...]) -> set[int]:
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, (tuple, list)):
            found |= _storages(tuple(value))
    return found
